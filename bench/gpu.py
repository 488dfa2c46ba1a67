"""What a GPU makes of the warehouse, beside the machine's own limits: make bench-gpu.

.venv-gpu/bin/python bench/gpu.py --help
"""

from __future__ import annotations

import argparse
import platform
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.gpu import Machine, probe_machine
from kvwarehouse.report.report import Report, TableBlock
from kvwarehouse_bench.gpu.goals import PartOutcome, lines_of, shown
from kvwarehouse_bench.gpu.parts import (
    LENGTHS,
    PARTS,
    PartRequest,
    chosen,
    lengths_of,
    room_of,
    tried,
)
from kvwarehouse_bench.gpu.report import keep, kept, with_outcomes
from kvwarehouse_bench.gpu.ttft import SHAPES
from kvwarehouse_bench.harness.frame import BenchProgress, bench_parser, give, run
from kvwarehouse_bench.micro.conditions import processor

ABOUT = """\
Judges each figure against its goal. Without a GPU it measures nothing and says so, in the document
too. What a part found is kept when it ends, and is in the report of the parts that run later; one
that fails says why, the others go on, and the exit status is 1."""

EXAMPLES = """\
  bench/gpu.py                      all parts: about half an hour, a model of 8 billion
  bench/gpu.py --quick              a small model and little data: to see that it works
  bench/gpu.py --parts pinned,hbm   these again; the report has the others as they were
  bench/gpu.py --parts ttft --lengths 1024,32768 --rounds 3 --write"""

_ROOT = Path(__file__).resolve().parent.parent
_DOCUMENT = _ROOT / "docs" / "gpu.md"
_PACKAGES = ("torch", "transformers", "cupy-cuda13x", "kvikio-cu13", "nvidia-cufile")


def main() -> int:
    parser = bench_parser("gpu", ABOUT, EXAMPLES)
    parser.add_argument(
        "--parts", metavar="PART,PART", help=f"Of {', '.join(PARTS)}. Default: all of them."
    )
    parser.add_argument("--lengths", metavar="N,N", help=f"Prompts' tokens. Default: {LENGTHS}.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="Default: %(default)s.")
    parser.add_argument("--model", choices=SHAPES, help="Default: 8b, with --quick tiny.")
    parser.add_argument("--write", action="store_true", help="Also docs/gpu.md, after each part.")
    parser.add_argument(
        "--out",
        type=Path,
        default=_ROOT / "build" / "bench",
        metavar="DIR",
        help="Where what parts found is kept: gpu/, gpu-quick/. Default: %(default)s.",
    )
    failed: list[str] = []
    status = run(parser, partial(_measure, failed))
    return status or (Exit.FAILED if failed else Exit.OK)


def _measure(
    failed: list[str], args: argparse.Namespace, folder: Path, teller: BenchProgress
) -> Report:
    """Adds the parts that failed to `failed`."""
    parts = chosen(args.parts)
    lengths_of(args)  # refused before minutes of measuring, not after them
    machine = probe_machine(folder=str(folder))
    conditions = conditions_of(machine)
    results = args.out / ("gpu-quick" if args.quick else "gpu")
    for part in parts:
        teller.step(part)
        asked = PartRequest(args, machine, room_of(folder), folder / part)
        outcome, ended = tried(part, PARTS[part], asked)
        if not ended:
            failed.append(part)
        keep(outcome, conditions, results)
        _tell(outcome, teller)
        report = _report(machine, conditions, kept(list(PARTS), conditions, results), args)
        if part != parts[-1]:
            give(report, args)  # a limit of time may end this process in the next part
    return report


def _tell(outcome: PartOutcome, teller: BenchProgress) -> None:
    for figure in outcome.figures:
        teller.say(f"{outcome.part}: {figure.name}: {shown(figure)} {figure.verdict}".rstrip())
    if outcome.why_not:
        teller.say(f"{outcome.part}: {outcome.why_not}")


def _report(
    machine: Machine,
    conditions: dict[str, str],
    outcomes: list[PartOutcome],
    args: argparse.Namespace,
) -> Report:
    if args.write:
        text = with_outcomes(_DOCUMENT.read_text("utf-8"), conditions, machine.describe(), outcomes)
        _DOCUMENT.write_text(text, encoding="utf-8")
    rows = lines_of(outcomes)
    return Report(
        title="The warehouse with a GPU",
        summary=" ".join(machine.describe()),
        blocks=[
            TableBlock("conditions", ("", ""), list(conditions.items())),
            TableBlock("figures", ("figure", "goal", "measured", "verdict"), rows),
        ],
        figures={"conditions": conditions, "figures": [list(row) for row in rows]},
        notes=(),
    )


def conditions_of(machine: Machine) -> dict[str, str]:
    return {
        "machine": f"{processor()}, {', '.join(machine.devices) or 'no GPU'}",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "driver": f"CUDA {machine.cuda}" if machine.cuda else "none",
        "packages": ", ".join(_versions()) or "none of " + ", ".join(_PACKAGES),
    }


def _versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
