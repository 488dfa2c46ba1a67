"""Lookups and loads by the length of the prompt, against hashing and copying as much."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvwarehouse import core
from kvwarehouse_bench.micro.figures import Curve
from kvwarehouse_bench.micro.filled import PAGE_BYTES, SLOT_BYTES
from kvwarehouse_bench.micro.load import check_filled, copied
from kvwarehouse_bench.micro.options import PAGE_TOKENS, Options, noise, open_bench, prompt
from kvwarehouse_bench.micro.private import private_daemon
from kvwarehouse_bench.micro.rounds import in_turns, timed

_LOADED_BYTES = 64 << 10
_LOOKED_UP_A_TURN = 65_536
# Short loads go through so many pages, so that they meet memory as cold as long ones do.
_COLD_PAGES = 2_000
_SPARE_BYTES = 64 << 20
_WAIT_S = 60.0
_PAGES = "pages of the prompt"


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
