"""Stores of new pages with their digests, from rows and from a paged cache, against a plain
streaming copy of as many bytes. By page size. The client has written to the arena before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from kvwarehouse.client import Client
from kvwarehouse.sizes import format_size
from kvwarehouse_bench.harness.alternation import Rounds, in_turns, timed
from kvwarehouse_bench.micro.figures import Curve, Figure
from kvwarehouse_bench.micro.load import PAGED, ROWS, by_page_size, check_filled, copied
from kvwarehouse_bench.micro.options import PIECES, Bench, noise, open_bench, paged_cache, prompt
from kvwarehouse_bench.micro.private import for_one_size

_GOAL_FROM_BYTES = 256 << 10


def measure(bench: Bench) -> list[Figure | Curve]:
    found = {
        page_bytes: for_one_size(bench, partial(_of_size, bench, page_bytes))
        for page_bytes in bench.options.sizes.page_bytes
    }
    figures = [
        Figure.of_speed(
            f"store, from {where}, pages of {format_size(page_bytes)}",
            bench.options.pages_of(page_bytes) * page_bytes,
            rounds,
            "streaming copy",
            "ratio 0.7 or more" if page_bytes >= _GOAL_FROM_BYTES else "",
        )
        for page_bytes, by_side in found.items()
        for (where, _), rounds in by_side.items()
    ]
    return [*figures, *by_page_size("store, beside a streaming copy", found)]


def _of_size(
    bench: Bench, page_bytes: int, client: Client, rounds: int
) -> dict[tuple[str, str], Rounds]:
    ns = open_bench(client, page_bytes)
    pages_each = bench.options.pages_of(page_bytes)
    pages = noise(pages_each, page_bytes)
    other = np.ones_like(pages)
    sources: dict[str, Any] = {ROWS: pages}
    if page_bytes % PIECES == 0:
        sources[PAGED] = paged_cache(pages_each, page_bytes)
        sources[PAGED].scatter(pages)
    seeds = count(1)

    def stores(where: str) -> Callable[[], float]:
        def store() -> float:
            client.clear(ns.space)
            tokens = prompt(pages_each, seed=next(seeds))
            taken = timed(lambda: ns.store(tokens, sources[where], timeout_s=60))
            check_filled(ns.lookup(tokens).pages, pages_each)
            return taken

        return store

    # A process pays for its first write to each part of the arena, once: `effects` says how much.
    for _ in range(-(-bench.options.dram_bytes // pages.nbytes)):
        stores(ROWS)()
    *ours, copies = in_turns(
        rounds, [*(stores(where) for where in sources), lambda: copied(other, pages)]
    )
    client.clear(ns.space)
    return {
        (where, ""): Rounds(seconds, copies) for where, seconds in zip(sources, ours, strict=True)
    }
