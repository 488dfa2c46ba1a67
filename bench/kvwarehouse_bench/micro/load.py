"""Loads of pages in DRAM, with their digests and without, into rows and into a paged cache, against
a plain streaming copy of as many bytes. By page size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse import core
from kvwarehouse.client import Client, OpenNamespace, connect
from kvwarehouse.errors import CapacityError
from kvwarehouse.sizes import format_size
from kvwarehouse_bench.harness.alternation import Rounds, in_turns, timed
from kvwarehouse_bench.micro.figures import Curve, Figure
from kvwarehouse_bench.micro.options import PIECES, Bench, noise, open_bench, paged_cache, prompt
from kvwarehouse_bench.micro.private import for_one_size

VERIFIED, BOUNDARY = "verified", "boundary"
ROWS, PAGED = "rows", "paged cache"
_MIB = 1 << 20
_VERIFIED_FROM_BYTES = 256 << 10

_COPIED_PAGES, _COPIED_PAGE_BYTES = 64, 2 << 20
_COPIES = 5


def measure(bench: Bench) -> list[Figure | Curve]:
    found = {
        page_bytes: for_one_size(bench, partial(_of_size, bench, page_bytes))
        for page_bytes in bench.options.sizes.page_bytes
    }
    figures = [
        Figure.of_speed(
            f"load, {mode}, into {where}, pages of {format_size(page_bytes)}",
            bench.options.pages_of(page_bytes) * page_bytes,
            rounds,
            "streaming copy",
            _goal(mode, page_bytes),
        )
        for page_bytes, by_side in found.items()
        for (where, mode), rounds in by_side.items()
    ]
    return [*figures, *by_page_size("load, beside a streaming copy", found)]


def _of_size(
    bench: Bench, page_bytes: int, client: Client, rounds: int
) -> dict[tuple[str, str], Rounds]:
    with connect(client.address, verify="boundary") as trusting:
        ns = open_bench(client, page_bytes)
        count = bench.options.pages_of(page_bytes)
        found = _compared(count, rounds, ns, trusting.open(ns.space))
        client.clear(ns.space)
    return found


def _compared(
    count: int, rounds: int, verified: OpenNamespace, trusting: OpenNamespace
) -> dict[tuple[str, str], Rounds]:
    """Of pages that were never re-attached, so that `boundary` has none to verify."""
    page_bytes = verified.space.page_bytes
    pages, tokens = noise(count, page_bytes), prompt(count, seed=1)
    verified.store(tokens, pages, timeout_s=60)
    check_filled(verified.lookup(tokens).pages, count)
    out = np.ones_like(pages)
    targets: dict[str, Any] = {ROWS: out}
    if page_bytes % PIECES == 0:
        targets[PAGED] = paged_cache(count, page_bytes)
    names = [(where, mode) for where in targets for mode in (VERIFIED, BOUNDARY)]
    spaces = {VERIFIED: verified, BOUNDARY: trusting}

    def loads(where: str, mode: str) -> Callable[[], float]:
        def load() -> float:
            filled = 0

            def call() -> None:
                nonlocal filled
                filled = spaces[mode].load(tokens, targets[where])

            taken = timed(call)
            check_filled(filled, count)
            return taken

        return load

    *ours, copies = in_turns(
        rounds, [*(loads(*name) for name in names), lambda: copied(out, pages)]
    )
    return {name: Rounds(seconds, copies) for name, seconds in zip(names, ours, strict=True)}


def _goal(mode: str, page_bytes: int) -> str:
    if mode == BOUNDARY:
        return "ratio 0.9 or more" if page_bytes >= 2 * _MIB else ""
    if page_bytes >= 2 * _MIB:
        return "ratio 0.75 or more"
    return "ratio 0.7 or more" if page_bytes >= _VERIFIED_FROM_BYTES else ""


def by_page_size(plot: str, found: dict[int, dict[tuple[str, str], Rounds]]) -> list[Curve]:
    """The ratios to the limit, a curve a side; none for a single size."""
    if len(found) < 2:
        return []
    sides = next(iter(found.values()))
    return [
        Curve(
            plot=plot,
            name=", ".join(part for part in side if part),
            x_label="page, KiB",
            y_label="ratio",
            points=[(size / 1024, by_side[side].speed_ratio) for size, by_side in found.items()],
        )
        for side in sides
    ]


def copied(to: NDArray[Any], source: NDArray[Any]) -> float:
    """Seconds of a plain streaming copy: the limit of this machine's memory for one thread."""
    return timed(lambda: core.copy_streaming(to.reshape(-1), source.reshape(-1)))


def check_filled(pages: int, expected: int) -> None:
    """A bench of a warehouse that dropped its pages would measure nothing."""
    if pages != expected:
        raise CapacityError(
            f"the warehouse has {pages} of the bench's {expected} pages; give it more room, or use"
            " a smaller --bytes",
            code="bench_room",
        )


def copy_bytes_per_s() -> float:
    """A plain streaming copy of memory by one thread: what a load can reach at most."""
    pages = noise(_COPIED_PAGES, _COPIED_PAGE_BYTES)
    to: Any = pages.copy()
    copied(to, pages)
    return pages.nbytes / statistics.median(copied(to, pages) for _ in range(_COPIES))
