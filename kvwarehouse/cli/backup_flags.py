"""What `export` and `import` have in common: files or pipes, a rate, and a line of progress."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from rich.progress import Progress, TextColumn, TimeElapsedColumn

from kvwarehouse.backup import RateLimit
from kvwarehouse.cli.output import console
from kvwarehouse.errors import UsageError
from kvwarehouse.sizes import parse_size

PIPE: Final = "-"
LEAST_RATE: Final = 64 << 10

_Counts = TypeVar("_Counts")


def add_rate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit-rate",
        metavar="SIZE",
        help="Move at most so much KV a second (100MiB). Default: as fast as it goes.",
    )


def rate_from(args: argparse.Namespace) -> RateLimit:
    if args.limit_rate is None:
        return RateLimit(None)
    bytes_per_s = parse_size(args.limit_rate, name="--limit-rate")
    if bytes_per_s < LEAST_RATE:
        raise UsageError(
            f"--limit-rate {args.limit_rate} would take days for a page; use 64KiB or more",
            code="bad_bounds",
        )
    return RateLimit(bytes_per_s)


def refuse_terminal(stream: object, what: str) -> None:
    if getattr(stream, "isatty", bool)():
        raise UsageError(what, code="terminal")


def follow(parts: Iterable[_Counts], describe: Callable[[_Counts], str]) -> None:
    """To their end, with a line on a terminal's stderr."""
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        for part in parts:
            progress.update(task, description=describe(part))
