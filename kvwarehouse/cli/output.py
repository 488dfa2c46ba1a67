"""How commands print: tables for people, one JSON object for programs, a report as either or as a
page, and a line on stderr now and then while a command goes on for long. Not thread-safe.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvwarehouse.durations import parse_duration
from kvwarehouse.report.html import write_page
from kvwarehouse.report.report import Report

_PIPE_COLUMNS = 200

_DEFAULT_PROGRESS = "10s"


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead.")


def print_json(value: Any) -> None:
    """Bytes are printed as hex digits."""
    json.dump(value, sys.stdout, indent=2, default=_plain)
    sys.stdout.write("\n")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to main.py, as for what is printed without rich."""
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """In a pipe the lines are not cut to the width of a terminal that is not there."""
    stream = sys.stderr if stderr else sys.stdout
    return _Console(file=stream, width=None if stream.isatty() else _PIPE_COLUMNS)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A column whose name starts with ">" is set to the right, as numbers are."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console().print(table)


def _cell(value: Any) -> Text:
    if isinstance(value, bytes):
        return Text(value.hex())
    # Text from outside is printed as it is: square brackets in it are no markup.
    return Text(f"{value:,}" if isinstance(value, int) else str(value))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def add_report_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html", metavar="FILE", help="Also write one self-contained HTML page with plots."
    )
    add_json(parser)


def print_report(report: Report, args: argparse.Namespace) -> None:
    """Raises UsageError where the page cannot be written; then nothing is printed."""
    if args.html is not None:
        write_page(report, args.html)
    if args.json:
        print_json(dict(report.figures))
        return
    shown = console()
    shown.print(f"{report.title}\n{report.summary}", markup=False, highlight=False)
    for block in report.tables:
        print()
        print_table(block.title, block.columns, block.rows)
        if block.note:
            shown.print(block.note, style="dim", markup=False, highlight=False)
    if report.notes:
        print()
        for note in report.notes:
            shown.print(f"- {note}", style="dim", markup=False, highlight=False)


def add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--progress",
        default=_DEFAULT_PROGRESS,
        metavar="TIME",
        help=f"A line on stderr every so often; 0 for none (default: {_DEFAULT_PROGRESS}).",
    )


class Progress:
    def __init__(self, every_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """None: says nothing."""
        self.every_s = every_s
        self._clock = clock
        self._next_s = clock() + (every_s or 0)

    def tell(self, line: Callable[[], str]) -> None:
        """Prints what `line` returns, if it is time."""
        if self.every_s is None or self._clock() < self._next_s:
            return
        self._next_s = self._clock() + self.every_s
        print(line(), file=sys.stderr, flush=True)


def progress_from(args: argparse.Namespace) -> Progress:
    return Progress(
        None if args.progress == "0" else parse_duration(args.progress, name="--progress")
    )
