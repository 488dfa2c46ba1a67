"""What sessions cost the others and the daemon: stores that evict while all of them hold pins, one
more client that connects, and what the daemon uses and holds for those that do nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count

from kvwarehouse.client import Client, OpenNamespace, connect
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse_bench.micro.figures import Curve
from kvwarehouse_bench.micro.filled import PAGE_BYTES, full_settings, is_full
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.options import Options, noise, open_bench, prompt
from kvwarehouse_bench.micro.private import private_daemon
from kvwarehouse_bench.micro.process import private_bytes, processor_s, taken_bytes
from kvwarehouse_bench.micro.rounds import in_turns, timed

_PINNED = 8
_STORED = 256
_CALLS = 4
_SEEDS = count(1 << 33)
_SESSIONS = "sessions"


@dataclass(frozen=True)
class _Crowd:
    sessions: int
    daemon: PrivateDaemon
    ns: OpenNamespace
    empty_bytes: int
    """The daemon's own, before they came."""


def by_sessions(options: Options) -> list[Curve]:
    """A daemon for each number of sessions, all at once: rounds go through them in turns."""
    counts = options.sizes.sessions
    sides = {"store of a page, evicting another": _store, "one more that connects": _connect}
    with ExitStack() as stack:
        crowds = {number: stack.enter_context(_crowd(number)) for number in counts}
        turns = [(what, number) for what in sides for number in counts]
        taken = in_turns(options.rounds, [_side(sides[what], crowds[n]) for what, n in turns])
        used = _idle(list(crowds.values()), options.sizes.idle_s)
        held = {number: _held_bytes(crowd) / number for number, crowd in crowds.items()}
    medians = dict(zip(turns, (statistics.median(each) * 1e6 for each in taken), strict=True))
    return [
        *(
            Curve("by sessions: time", what, _SESSIONS, "us",
                  [(number, medians[what, number]) for number in counts])
            for what in sides
        ),
        Curve("by sessions: idle daemon", "processor", _SESSIONS, "us a second, a session",
              [(number, each / number) for number, each in used.items()]),
        Curve("by sessions: memory", "daemon and session file", _SESSIONS, "KiB a session",
              [(number, each / 1024) for number, each in held.items()]),
    ]  # fmt: skip


def _side(call: Callable[[_Crowd], float], crowd: _Crowd) -> Callable[[], float]:
    return lambda: call(crowd)


@contextmanager
def _crowd(number: int) -> Iterator[_Crowd]:
    with private_daemon(full_settings()) as (daemon, client), ExitStack() as stack:
        ns = open_bench(client, PAGE_BYTES)
        empty_bytes = private_bytes(daemon.pid)
        # The first is the one that is connected already.
        others = [stack.enter_context(connect(daemon.address)) for _ in range(number - 1)]
        for each in (client, *others):
            _pin(stack, each, ns)
        crowd = _Crowd(number, daemon, ns, empty_bytes)
        while not is_full(client):
            _store(crowd)
        yield crowd


def _pin(stack: ExitStack, client: Client, ns: OpenNamespace) -> None:
    tokens = prompt(_PINNED, seed=next(_SEEDS))
    mine = client.open(ns.space)
    mine.store(tokens, noise(_PINNED, PAGE_BYTES))
    pins = mine.pin(tokens)
    check_filled(pins.pages, _PINNED)
    stack.callback(pins.release)


def _store(crowd: _Crowd) -> float:
    """Seconds a page."""
    tokens = prompt(_STORED, seed=next(_SEEDS))
    rows = noise(_STORED, PAGE_BYTES)
    stored = 0

    def call() -> None:
        nonlocal stored
        stored = crowd.ns.store(tokens, rows, timeout_s=60).stored

    taken = timed(call)
    check_filled(stored, _STORED)
    return taken / _STORED


def _connect(crowd: _Crowd) -> float:
    def call() -> None:
        with connect(crowd.daemon.address):
            pass

    return timed(call, _CALLS)


def _idle(crowds: list[_Crowd], seconds: float) -> dict[int, float]:
    """Microseconds of processor time a second, by sessions; of all daemons over the same time."""
    before = [processor_s(crowd.daemon.pid) for crowd in crowds]
    start = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - start
    return {
        crowd.sessions: 1e6 * (processor_s(crowd.daemon.pid) - used) / passed
        for crowd, used in zip(crowds, before, strict=True)
    }


def _held_bytes(crowd: _Crowd) -> int:
    """Beside what the daemon held before they came; an allocator's spare room is in it."""
    own = private_bytes(crowd.daemon.pid) - crowd.empty_bytes
    return own + taken_bytes(crowd.daemon.arena_dir, "sessions/*")
