"""Lookups, misses and stores by how much is stored: in daemons with their index sized for it, and
in the index alone, which goes on where the pages would not fit this machine's memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count

from kvwarehouse import core
from kvwarehouse.client import Client, OpenNamespace, connect
from kvwarehouse_bench.micro.figures import Curve
from kvwarehouse_bench.micro.filled import CHAIN, PAGE_BYTES, chain, filled_daemon
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.options import Options, noise, open_bench, prompt
from kvwarehouse_bench.micro.rounds import in_turns, timed

_CALLS = 16
_STORED = 1024
_SEEDS = count(1 << 32)  # of prompts that are in no daemon


def in_daemons(options: Options) -> list[Curve]:
    """All of them at once, so that rounds go through them in turns."""
    counts = options.sizes.stored
    with ExitStack() as stack:
        held = {pages: stack.enter_context(_holding(pages)) for pages in counts}
        turns = [(what, pages) for what in _SIDES for pages in counts]
        taken = in_turns(options.rounds, [_side(what, held[pages]) for what, pages in turns])
    medians = dict(zip(turns, (statistics.median(each) * 1e6 for each in taken), strict=True))
    return [
        Curve(
            "by pages stored", what, "pages stored", "us", [(n, medians[what, n]) for n in counts]
        )
        for what in _SIDES
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
        filled_daemon(pages, index_pages=2 * (pages + _STORED)) as filled,
        connect(filled.daemon.address) as client,
    ):
        yield _Held(pages, client, filled.ns, open_bench(client, 2 * PAGE_BYTES))


def _side(what: str, held: _Held) -> Callable[[], float]:
    return lambda: _SIDES[what](held)


def _hits(held: _Held) -> float:
    """Of chains all over the index; seconds a page."""
    whole = max(1, held.pages // CHAIN)
    numbers = range(0, whole, max(1, whole // _CALLS))
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
    asked = [prompt(1, seed=next(_SEEDS)) for _ in range(_CALLS * _CALLS)]
    return timed(lambda: [held.stored.lookup(tokens) for tokens in asked]) / len(asked)


def _stores(held: _Held) -> float:
    """Beside what is stored; seconds a page."""
    held.client.clear(held.other.space)
    rows = noise(_STORED, 2 * PAGE_BYTES)
    tokens = prompt(_STORED, seed=next(_SEEDS))
    taken = timed(lambda: held.other.store(tokens, rows, timeout_s=60))
    check_filled(held.other.lookup(tokens).pages, _STORED)
    return taken / _STORED


_SIDES: dict[str, Callable[[_Held], float]] = {
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
