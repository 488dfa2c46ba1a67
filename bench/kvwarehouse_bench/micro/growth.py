"""What an item costs by how many there are. Where cost grows faster than the number, an item's
rises.

Pages of a prompt: lookups and loads by its length, against hashing and copying as much.

Entries of the index: lookups, misses and stores by how much is stored, in daemons with their index
sized for it, and in the index alone, which goes on where the pages would not fit this machine's
memory.

Sessions: what they cost the others and the daemon, in stores that evict while all of them hold
pins, in one more client that connects, and in what the daemon uses and holds for those that do
nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from kvwarehouse import core
from kvwarehouse.client import Client, OpenNamespace, connect
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse_bench.harness.alternation import in_turns, timed
from kvwarehouse_bench.micro.figures import Curve, Figure
from kvwarehouse_bench.micro.filled import (
    CHAIN,
    PAGE_BYTES,
    SLOT_BYTES,
    chain,
    filled_daemon,
    full_settings,
    is_full,
)
from kvwarehouse_bench.micro.load import check_filled, copied
from kvwarehouse_bench.micro.options import PAGE_TOKENS, Options, noise, open_bench, prompt
from kvwarehouse_bench.micro.private import private_daemon
from kvwarehouse_bench.micro.process import private_bytes, processor_s, taken_bytes

_INDEX_CALLS = 16
_STORED_IN_INDEX = 1024
_INDEX_SEEDS = count(1 << 32)  # of prompts that are in no daemon

_LOADED_BYTES = 64 << 10
_LOOKED_UP_A_TURN = 65_536
# Short loads go through so many pages, so that they meet memory as cold as long ones do.
_COLD_PAGES = 2_000
_SPARE_BYTES = 64 << 20
_WAIT_S = 60.0
_PAGES = "pages of the prompt"

_PINNED = 8
_STORED_A_SESSION = 256
_SESSION_CALLS = 4
_SESSION_SEEDS = count(1 << 33)
_SESSIONS = "sessions"


def in_daemons(options: Options) -> list[Curve]:
    """All of them at once, so that rounds go through them in turns."""
    counts = options.sizes.stored
    with ExitStack() as stack:
        held = {pages: stack.enter_context(_holding(pages)) for pages in counts}
        turns = [(what, pages) for what in _INDEX_SIDES for pages in counts]
        taken = in_turns(options.rounds, [_index_side(what, held[pages]) for what, pages in turns])
    medians = dict(zip(turns, (statistics.median(each) * 1e6 for each in taken), strict=True))
    return [
        Curve(
            "by pages stored", what, "pages stored", "us", [(n, medians[what, n]) for n in counts]
        )
        for what in _INDEX_SIDES
    ]


@dataclass(frozen=True)
class _Held:
    pages: int
    client: Client
    stored: OpenNamespace
    other: OpenNamespace
    """For what comes and goes beside them."""


@contextmanager
def _holding(pages: int) -> Iterator[_Held]:
    with (
        filled_daemon(pages, index_pages=2 * (pages + _STORED_IN_INDEX)) as filled,
        connect(filled.daemon.address) as client,
    ):
        yield _Held(pages, client, filled.ns, open_bench(client, 2 * PAGE_BYTES))


def _index_side(what: str, held: _Held) -> Callable[[], float]:
    return lambda: _INDEX_SIDES[what](held)


def _hits(held: _Held) -> float:
    """Of chains all over the index; seconds a page."""
    whole = max(1, held.pages // CHAIN)
    numbers = range(0, whole, max(1, whole // _INDEX_CALLS))
    asked = [chain(number, min(CHAIN, held.pages)) for number in numbers]
    found = 0

    def call() -> None:
        nonlocal found
        found = sum(held.stored.lookup(tokens).pages for tokens in asked)

    taken = timed(call)
    check_filled(found, len(asked) * min(CHAIN, held.pages))
    return taken / found


def _misses(held: _Held) -> float:
    """Whose first page is not there; seconds a call."""
    asked = [prompt(1, seed=next(_INDEX_SEEDS)) for _ in range(_INDEX_CALLS * _INDEX_CALLS)]
    return timed(lambda: [held.stored.lookup(tokens) for tokens in asked]) / len(asked)


def _stores(held: _Held) -> float:
    """Beside what is stored; seconds a page."""
    held.client.clear(held.other.space)
    rows = noise(_STORED_IN_INDEX, 2 * PAGE_BYTES)
    tokens = prompt(_STORED_IN_INDEX, seed=next(_INDEX_SEEDS))
    taken = timed(lambda: held.other.store(tokens, rows, timeout_s=60))
    check_filled(held.other.lookup(tokens).pages, _STORED_IN_INDEX)
    return taken / _STORED_IN_INDEX


_INDEX_SIDES: dict[str, Callable[[_Held], float]] = {
    "lookup of what is stored, a page": _hits,
    "lookup that misses": _misses,
    "store, a page": _stores,
}


def alone(options: Options) -> list[Curve]:
    """Tables of the core's own, no arena beside them."""
    costs = core.index_costs(list(options.sizes.indexed), options.rounds)
    names = {"found": "hit_ns", "not there": "miss_ns", "taken out and written again": "replace_ns"}
    return [
        Curve(plot="index alone", name=name, x_label="entries", y_label="ns an entry",
              points=[(cost["entries"], statistics.median(cost[key])) for cost in costs])
        for name, key in names.items()
    ]  # fmt: skip


def lookups(options: Options) -> list[Curve]:
    """All pages stored; each prompt is the beginning of the longest."""
    lengths = options.sizes.looked_up
    settings = {
        "dram": lengths[-1] * SLOT_BYTES * 5 // 4 + _SPARE_BYTES,
        "index_pages": 2 * lengths[-1],
    }
    with private_daemon(settings) as (_, client):
        ns = open_bench(client, PAGE_BYTES)
        tokens = prompt(lengths[-1], seed=1)
        ns.store(tokens, noise(lengths[-1], PAGE_BYTES), timeout_s=_WAIT_S)
        check_filled(ns.lookup(tokens).pages, lengths[-1])
        secret = np.random.default_rng(2).bytes(core.SECRET_BYTES)

        def lookup(pages: int) -> float:
            short = tokens[: pages * PAGE_TOKENS]
            return timed(lambda: ns.lookup(short), _times(pages)) / pages

        def hashing(pages: int) -> float:
            short = tokens[: pages * PAGE_TOKENS]
            return (
                timed(
                    lambda: core.chain_keys(secret, ns.space.id, short, PAGE_TOKENS),
                    _times(pages),
                )
                / pages
            )

        return _curves(
            "lookup by length", "ns a page", 1e9, options, lengths,
            {"lookup": lookup, "hashing the tokens alone": hashing},
        )  # fmt: skip


def _times(pages: int) -> int:
    return max(1, _LOOKED_UP_A_TURN // pages)


def loads(options: Options) -> list[Curve]:
    """Verified, of pages of 64 KiB; a page costs the same processor time and memory anywhere."""
    lengths = options.sizes.loaded
    cold = min(_COLD_PAGES, lengths[-1])
    prompts = {pages: max(1, cold // pages) for pages in lengths}
    stored = sum(pages * count for pages, count in prompts.items())
    with private_daemon({"dram": stored * _LOADED_BYTES * 9 // 8 + _SPARE_BYTES}) as (_, client):
        ns = open_bench(client, _LOADED_BYTES)
        rows = noise(max(lengths[-1], cold), _LOADED_BYTES)
        out: Any = np.ones_like(rows)
        asked = {
            pages: [prompt(pages, seed=pages << 16 | number) for number in range(count)]
            for pages, count in prompts.items()
        }
        for pages, each in asked.items():
            for tokens in each:
                ns.store(tokens, rows[:pages], timeout_s=_WAIT_S)
                check_filled(ns.lookup(tokens).pages, pages)

        def load(pages: int) -> float:
            def call() -> None:
                for at, tokens in enumerate(asked[pages]):
                    check_filled(ns.load(tokens, out[at * pages : (at + 1) * pages]), pages)

            return timed(call) / (pages * prompts[pages])

        def copy(pages: int) -> float:
            begins = range(0, pages * prompts[pages], pages)
            taken = sum(copied(out[at : at + pages], rows[at : at + pages]) for at in begins)
            return taken / (pages * prompts[pages])

        return _curves(
            "load by length, pages of 64 KiB", "us a page", 1e6, options, lengths,
            {"load, verified": load, "streaming copy": copy},
        )  # fmt: skip


def _curves(
    plot: str,
    y_label: str,
    scale: float,
    options: Options,
    lengths: Sequence[int],
    sides: dict[str, Callable[[int], float]],
) -> list[Curve]:
    """Every side at every length, in turns; a side returns seconds a page."""
    turns = [(name, length) for name in sides for length in lengths]
    taken = in_turns(
        options.rounds,
        [lambda name=name, length=length: sides[name](length) for name, length in turns],  # type: ignore[misc]
    )
    medians = dict(zip(turns, (statistics.median(each) * scale for each in taken), strict=True))
    return [
        Curve(plot, name, _PAGES, y_label, [(n, medians[name, n]) for n in lengths])
        for name in sides
    ]


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
        taken = in_turns(
            options.rounds, [_session_side(sides[what], crowds[n]) for what, n in turns]
        )
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


def _session_side(call: Callable[[_Crowd], float], crowd: _Crowd) -> Callable[[], float]:
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
    tokens = prompt(_PINNED, seed=next(_SESSION_SEEDS))
    mine = client.open(ns.space)
    mine.store(tokens, noise(_PINNED, PAGE_BYTES))
    pins = mine.pin(tokens)
    check_filled(pins.pages, _PINNED)
    stack.callback(pins.release)


def _store(crowd: _Crowd) -> float:
    """Seconds a page."""
    tokens = prompt(_STORED_A_SESSION, seed=next(_SESSION_SEEDS))
    rows = noise(_STORED_A_SESSION, PAGE_BYTES)
    stored = 0

    def call() -> None:
        nonlocal stored
        stored = crowd.ns.store(tokens, rows, timeout_s=60).stored

    taken = timed(call)
    check_filled(stored, _STORED_A_SESSION)
    return taken / _STORED_A_SESSION


def _connect(crowd: _Crowd) -> float:
    def call() -> None:
        with connect(crowd.daemon.address):
            pass

    return timed(call, _SESSION_CALLS)


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


_PARTS: Sequence[Callable[[Options], list[Curve]]] = (
    lookups,
    loads,
    in_daemons,
    alone,
    by_sessions,
)


def measure(options: Options) -> list[Figure | Curve]:
    curves = [curve for part in _PARTS for curve in part(options)]
    growths = [(curve, curve.growth) for curve in curves]
    return [*(_figure(curve, growth) for curve, growth in growths if growth), *curves]


def _figure(curve: Curve, growth: float) -> Figure:
    """Of the last point, over the cheapest: 1 where an item costs least when there are most."""
    most = curve.points[-1][0]
    return Figure(
        f"{curve.plot}, {curve.name}: an item of {most:,.0f}, over the cheapest", growth, "times"
    )
