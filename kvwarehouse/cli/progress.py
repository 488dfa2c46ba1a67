"""A line on stderr now and then, for commands that go on for long. Not thread-safe."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from kvwarehouse.durations import parse_duration

_DEFAULT = "10s"


def add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--progress",
        default=_DEFAULT,
        metavar="TIME",
        help=f"A line on stderr every so often; 0 for none (default: {_DEFAULT}).",
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
