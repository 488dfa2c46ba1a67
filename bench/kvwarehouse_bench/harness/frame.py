"""From arguments to an exit status, the same for every bench: options that all have, a folder that
goes away again, errors as one line; what it says on stderr while it works, a bar on a terminal,
else a line now and then; and what it hands out, tables on stdout, and on request JSON, a page
and a picture.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvwarehouse.cli.exit_codes import Exit, exit_code_of
from kvwarehouse.cli.output import print_report
from kvwarehouse.errors import UsageError, WarehouseError
from kvwarehouse.report.report import Plot, Report
from kvwarehouse_bench.harness.bitmap import write_png
from kvwarehouse_bench.harness.process import ProgramError

_LINE_EVERY_S = 15.0


def add_answer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="Also write all figures, every round.")
    parser.add_argument("--html", metavar="FILE", help="Also write one self-contained page.")
    parser.add_argument("--png", metavar="FILE", help="Also write the first plot as a picture.")


def give(report: Report, args: argparse.Namespace) -> None:
    """Prints and writes. Raises UsageError where a file cannot be written."""
    if args.json is not None:
        text = json.dumps(report.figures, indent=1)
        _written(args.json, lambda path: path.write_text(text + "\n", encoding="utf-8"))
    plots = [block for block in report.blocks if isinstance(block, Plot)]
    if args.png is not None and plots:
        _written(args.png, lambda path: write_png(plots[0], path))
    print_report(report, argparse.Namespace(html=args.html, json=False))


def check_paths(args: argparse.Namespace) -> None:
    """Before an hour of measuring, not after it."""
    for name in (args.json, args.html, args.png):
        if name is not None and not Path(name).resolve().parent.is_dir():
            raise UsageError(
                f"{name} is in a folder that does not exist; make it first", code="bad_path"
            )


def _written(name: str, write: Callable[[Path], object]) -> None:
    try:
        write(Path(name))
    except OSError as error:
        raise UsageError(
            f"{name} cannot be written: {error.strerror or error}", code="bad_path"
        ) from error


class BenchProgress:
    """A context manager. Work is counted in any unit, of which `expect` says how much there is."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            BarColumn(24),
            TimeElapsedColumn(),
            TextColumn("of about"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._said_at_s = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def expect(self, work: float) -> None:
        self._bar.reset(self._task, total=work)

    def step(self, text: str, work: float = 0.0) -> None:
        """What begins now; `work` is done."""
        self._bar.update(self._task, advance=work, description=text)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said_at_s > _LINE_EVERY_S:
            self._said_at_s = now
            self.say(f"... {text}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


Measure = Callable[[argparse.Namespace, Path, BenchProgress], Report]


def bench_parser(name: str, about: str, examples: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"bench/{name}.py",
        description=about,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--quick", action="store_true", help="A minute or two to see that all works: no figures."
    )
    parser.add_argument(
        "--dir",
        default=tempfile.gettempdir(),
        metavar="DIR",
        help="On the disk to measure; what is written there is removed. Default: %(default)s.",
    )
    add_answer(parser)
    return parser


def run(parser: argparse.ArgumentParser, measure: Measure) -> int:
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.INTERRUPTED))  # what was made, goes
    try:
        check_paths(args)
        with _folder(args.dir) as folder, BenchProgress() as teller:
            report = measure(args, Path(folder), teller)
        give(report, args)
    except WarehouseError as error:
        print(f"{parser.prog}: {error} [{error.code}]", file=sys.stderr)
        return exit_code_of(error)
    except ProgramError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return Exit.FAILED
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    return Exit.OK


def numbers(text: str, name: str, least: int, most: int) -> list[int]:
    """Of a list with commas; in rising order."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"{name} {text}: not a list of numbers", code="bad_bench") from None
    if not least <= found[0] <= found[-1] <= most:
        raise UsageError(f"{name} {text}: out of range; use {least} to {most}", code="bad_bench")
    return found


def _folder(base: str) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="kvw-bench-", dir=base)
    except OSError as error:
        raise UsageError(f"--dir {base}: {error.strerror or error}", code="bad_bench") from error
