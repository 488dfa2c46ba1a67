"""Every measure of `kvwarehouse bench`, one after the other, and one report of what they found.

.venv/bin/python bench/warehouse.py --help
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvwarehouse.cli.exit_codes import Exit, exit_code_of
from kvwarehouse.cli.output import print_report
from kvwarehouse.errors import UsageError, WarehouseError
from kvwarehouse_bench.harness.bitmap import write_png
from kvwarehouse_bench.micro import MEASURES, run_measure
from kvwarehouse_bench.micro.figures import Result, print_figures, read_results, write_result
from kvwarehouse_bench.micro.options import Options, Sizes
from kvwarehouse_bench.micro.report import bench_report, picture_name, plots, with_results

ABOUT = """\
The warehouse beside this machine's own limits: each measure's figures go to a file of its own, and
one page, pictures and one JSON file are made of all files that are there. Run all of it, or one
measure at a time when the machine is quiet."""

EXAMPLES = """\
  bench/warehouse.py                      all measures: about 20 minutes, 7 GB of memory
  bench/warehouse.py growth memory        these again; the report has the others as they were
  bench/warehouse.py --report --write     no measure: docs/benchmarks.md from what there is"""

_ROOT = Path(__file__).resolve().parent.parent
_DOCUMENT = _ROOT / "docs" / "benchmarks.md"
_PICTURES = "images"
_PAGE_BYTES = 2 << 20
_MOVED_BYTES = 256 << 20


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    try:
        _check(args)
        for name in () if args.report else args.measures or MEASURES:
            _run(name, args)
        results = read_results(args.out / "warehouse", list(MEASURES))
        if not results:
            raise UsageError(f"{args.out} has no results yet; run a measure", code="bad_bench")
        _report(results, args.out)
        if args.write:
            _write(results)
    except WarehouseError as error:
        print(f"{parser.prog}: {error} [{error.code}]", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    return Exit.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/warehouse.py",
        description=ABOUT,
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help="Default: all of them.")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="Default: 9.")
    parser.add_argument(
        "--quick", action="store_true", help="Three rounds: to see that all works, no figures."
    )
    parser.add_argument(
        "--nvme-dir",
        metavar="DIR",
        help="On the disk to measure; what is written there goes again. Default: that of --out.",
    )
    parser.add_argument("--minutes", type=float, default=2.0, metavar="N", help="Of the soak.")
    parser.add_argument("--report", action="store_true", help="No measure, only the report.")
    parser.add_argument(
        "--write", action="store_true", help="Also docs/benchmarks.md and its pictures."
    )
    parser.add_argument(
        "--out", type=Path, default=_ROOT / "build" / "bench", metavar="DIR", help="%(default)s"
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    """Before minutes of measuring, not after them."""
    unknown = sorted(set(args.measures) - set(MEASURES))
    if unknown:
        raise UsageError(
            f"{', '.join(unknown)}: no measure; there are {', '.join(MEASURES)}", code="bad_bench"
        )
    if not 3 <= args.rounds <= 1000:
        raise UsageError(f"--rounds {args.rounds}; use 3 to 1000", code="bad_bench")
    if args.write:
        with_results(_DOCUMENT.read_text("utf-8"), [], _PICTURES)
    args.out.mkdir(parents=True, exist_ok=True)


def _run(name: str, args: argparse.Namespace) -> None:
    print(f"\n{name}: {MEASURES[name]}", flush=True)
    options = Options(
        3 if args.quick else args.rounds,
        _PAGE_BYTES,
        _MOVED_BYTES // _PAGE_BYTES,
        args.nvme_dir or str(args.out),
        Sizes(soak_minutes=args.minutes),
    )
    begin = time.monotonic()
    result = run_measure(name, options)
    write_result(result, args.out / "warehouse")
    print_figures(result.found, result.conditions)
    print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)


def _report(results: Sequence[Result], out: Path) -> None:
    report = bench_report(results)
    text = json.dumps(report.figures, indent=1)
    (out / "warehouse.json").write_text(text + "\n", encoding="utf-8")
    for plot in plots(results):
        write_png(plot, out / picture_name(plot))
    print_report(report, argparse.Namespace(html=out / "warehouse.html", json=False))


def _write(results: Sequence[Result]) -> None:
    """Pictures of plots that are no more are removed: nothing refers to them."""
    folder = _DOCUMENT.parent / _PICTURES
    kept = {picture_name(plot) for plot in plots(results)}
    for plot in plots(results):
        write_png(plot, folder / picture_name(plot))
    for old in folder.glob("warehouse_*.png"):
        if old.name not in kept:
            old.unlink()
    written = with_results(_DOCUMENT.read_text("utf-8"), results, _PICTURES)
    _DOCUMENT.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
