"""`kvwarehouse top`: a running warehouse, live.

A look is one call of status. Namespaces are listed only when status names one that is not known
yet, at most every 10 s. Nothing else is asked of the daemon, and no session of it is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live

from kvwarehouse.cli.connection import add_connection, connect_from
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import console
from kvwarehouse.cli.top_frame import NamespaceSize, Snapshot, frame_of
from kvwarehouse.cli.top_history import History
from kvwarehouse.cli.top_view import View, lines_of
from kvwarehouse.client import Client
from kvwarehouse.durations import parse_duration
from kvwarehouse.errors import UsageError, WarehouseError

EXAMPLES = """\
  kvwarehouse top                               q or Ctrl-C ends it
  kvwarehouse top --interval 5s --address gpu-7:7070 --tls ca.pem --token-file token
  kvwarehouse top --once                        one frame, as plain text
  kvwarehouse top --json --count 60 | jq .rates.core.loads.bytes_loaded

Rates are of the last interval. Where the output is no terminal, frames are printed one below the
other. With --json there is one object a line: "status" as `kvwarehouse status --json` has it, and
"rates" with the counters of it, by the same names, as what they rose a second.
"""

_INTERVAL: Final = "1s"
_LEAST_S: Final = 0.1
_MOST_S: Final = 3600.0
_TIMEOUT_S: Final = 5.0
_LISTING_EVERY_S: Final = 10.0
_PIPE_COLUMNS: Final = 80
_RESIZE_SEEN_S: Final = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval",
        default=_INTERVAL,
        metavar="TIME",
        help=f"Between two looks, such as 500ms or 5s; {_LEAST_S:g} s to 1 h"
        f" (default: {_INTERVAL}).",
    )
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--count", type=int, metavar="N", help="End after N intervals.")
    ends.add_argument(
        "--once", action="store_true", help="Print one frame, of one interval, as plain text."
    )
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object a line and interval instead."
    )
    add_connection(parser, timeout_s=_TIMEOUT_S)


def run(args: argparse.Namespace) -> int:
    interval_s, count = _interval(args.interval), _count(args)
    with closing(_Source(args)) as source:
        first = source.look()
        if first.error is not None:  # as every command says it; later it is waited for
            raise first.error
        watch = _Watch(source, interval_s, count, first)
        shown = console()
        if args.json:
            return watch.follow(_sleep_until, _print_object)
        if args.once or not shown.is_terminal or shown.is_dumb_terminal:
            return _plain_frames(watch, shown)
        return _live_frames(watch, shown)


def _interval(text: str) -> float:
    interval_s = parse_duration(text, name="--interval", most_s=_MOST_S)
    if interval_s < _LEAST_S:
        raise UsageError(
            f"--interval {text} is too short; use {_LEAST_S:g} s or more", code="bad_duration"
        )
    return interval_s


def _count(args: argparse.Namespace) -> int | None:
    if args.count is not None and args.count < 1:
        raise UsageError(f"--count {args.count} shows nothing; use 1 or more", code="bad_count")
    return 1 if args.once else args.count


@dataclass(frozen=True)
class _Look:
    """A snapshot, or why there is none."""

    at: datetime
    status: Snapshot | None
    error: WarehouseError | None


class _Source:
    """Where looks come from. Every call has the deadline of --timeout."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._client: Client | None = None
        self._listing_at_s = 0.0
        self.sizes: dict[str, NamespaceSize] = {}

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def look(self) -> _Look:
        """Raises UsageError: what is wrong with the arguments stays wrong."""
        try:
            self._client = self._client or connect_from(self._args)
            status = self._client.status()
        except UsageError:
            raise
        except WarehouseError as error:
            return _Look(datetime.now().astimezone(), None, error)
        self._learn_sizes(self._client, status)
        return _Look(datetime.now().astimezone(), status, None)

    def _learn_sizes(self, client: Client, status: Snapshot) -> None:
        listed = status["core"]["namespaces"]
        if time.monotonic() < self._listing_at_s or all(
            each["id"] in self.sizes for each in listed
        ):
            return
        self._listing_at_s = time.monotonic() + _LISTING_EVERY_S
        with suppress(WarehouseError):  # the next look shows what is wrong with the daemon
            self.sizes = {
                each.id.hex(): NamespaceSize(
                    each.fields["model"], each.fields["page_bytes"] * each.fields["shards"]
                )
                for each in client.namespaces()
            }


class _Watch:
    """Looks, and what is remembered of them. `first`: where the first interval begins."""

    def __init__(self, source: _Source, interval_s: float, count: int | None, first: _Look) -> None:
        self._source = source
        self._count = count
        self._before = first.status
        self.interval_s = interval_s
        self.history = History()
        self.last = first
        self.shown = 0
        """Intervals that were."""

    def begin(self) -> None:
        """Takes the first look for a frame without rates."""
        self._before = None
        self._add(self.last)

    def follow(self, wait: Callable[[float], bool], show: Callable[[_Watch], None]) -> int:
        """Waits and looks, and has each look shown. `wait` takes a time of the monotonic clock; it
        returns False when somebody wants the end. Returns the exit status."""
        next_s = time.monotonic() + self.interval_s
        while self._count is None or self.shown < self._count:
            if not wait(next_s):
                return Exit.OK
            # A look that came late is not made up for by others in a row.
            next_s = max(next_s, time.monotonic()) + self.interval_s
            self._add(self._source.look())
            show(self)
            self.shown += 1
        return Exit.OK if self.last.error is None else Exit.NO_DAEMON

    def _add(self, look: _Look) -> None:
        self.last = look
        if look.status is not None:
            self.history.add(frame_of(self._before, look.status, self._source.sizes), look.at)
            self._before = look.status
        elif look.error is not None:
            self.history.miss(look.error.code, look.error.message, look.at)


def _sleep_until(end_s: float) -> bool:
    time.sleep(max(0.0, end_s - time.monotonic()))
    return True


def _print_object(watch: _Watch) -> None:
    look, frame = watch.last, watch.history.frame
    seen = look.status is not None and frame is not None
    error = look.error
    made: dict[str, Any] = {
        "time": look.at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "reachable": seen,
        "code": error.code if error else None,
        "reason": error.message if error else None,
        "interval_s": frame.interval_s if seen and frame else None,
        "restarted": bool(seen and frame and frame.restarted),
        "hit_rate": frame.hit_rate if seen and frame else None,
        "hit_rate_run": frame.hit_rate_run if seen and frame else None,
        "rates": frame.rates if seen and frame else {},
        "status": look.status,
    }
    sys.stdout.write(json.dumps(made, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def _plain_frames(watch: _Watch, shown: Console) -> int:
    columns = shown.width if shown.is_terminal else _PIPE_COLUMNS

    def show(watch: _Watch) -> None:
        if watch.shown:
            shown.print()
        _print_frame(watch, shown, columns)

    return watch.follow(_sleep_until, show)


def _print_frame(watch: _Watch, shown: Console, columns: int) -> None:
    for line in _lines(watch, shown, columns):
        shown.print(line, no_wrap=True, overflow="ignore", crop=False)


def _lines(watch: _Watch, shown: Console, columns: int) -> list[Any]:
    view = View(columns, shown.encoding.startswith("utf"), watch.interval_s)
    return list(lines_of(watch.history, watch.last.at, view))


def _live_frames(watch: _Watch, shown: Console) -> int:
    """On a screen of its own; the last frame stays on the terminal's."""
    signal.signal(signal.SIGTERM, _terminated)
    watch.begin()
    try:
        with _keys() as quits, Live(console=shown, screen=True, auto_refresh=False) as live:

            def show(watch: _Watch) -> None:
                live.update(Group(*_lines(watch, shown, shown.width)), refresh=True)

            def wait(end_s: float) -> bool:
                size = shown.size
                while (left_s := end_s - time.monotonic()) > 0:
                    if quits(min(left_s, _RESIZE_SEEN_S)):
                        return False
                    if shown.size != size:
                        size = shown.size
                        show(watch)
                return True

            show(watch)
            return watch.follow(wait, show)
    finally:
        _print_frame(watch, shown, shown.width)


def _terminated(number: int, _: Any) -> None:
    """The terminal is given back as it was."""
    raise SystemExit(128 + number)


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Gives what waits for so many seconds, and returns True as soon as q is pressed. Keys are not
    shown meanwhile. Without a keyboard it only waits."""
    if not sys.stdin.isatty():
        yield lambda wait_s: not _sleep_until(time.monotonic() + wait_s)
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def quits(wait_s: float) -> bool:
        end_s = time.monotonic() + wait_s
        while (left_s := end_s - time.monotonic()) > 0:
            if not select.select([keyboard], [], [], left_s)[0]:
                return False
            pressed = os.read(keyboard, 64)
            if not pressed or b"q" in pressed.lower():
                return True
        return False

    tty.setcbreak(keyboard)
    try:
        yield quits
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
