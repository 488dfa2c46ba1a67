"""How commands print: tables for people, one JSON object for programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_PIPE_COLUMNS = 200


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


def _cell(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    # Text from outside is printed as it is: square brackets in it are no markup.
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("[", r"\[")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")
