"""What Python would cost where it handled pages: a call for each page, against one call for all of
them. The same pages, by the same keys, in turns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from kvwarehouse.types import KeyRun
from kvwarehouse_bench.harness.alternation import alternate, timed
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.options import Bench, noise

PAGES = 1024
_PAGE_BYTES = 64 << 10
_KEY_BYTES = 32
_WAIT_S = 60.0

_Keys = list[bytes]


def measure(bench: Bench) -> list[Figure]:
    ns = bench.open(_PAGE_BYTES)
    pages = noise(PAGES, _PAGE_BYTES)
    out: Any = np.ones_like(pages)
    stored = _keys(seed=0)
    ns.store(keys=stored, pages=pages, timeout_s=_WAIT_S)
    runs = [_alone(stored, page) for page in range(PAGES)]
    seeds = count(1)

    def lookup_all() -> None:
        check_filled(ns.lookup(keys=stored).pages, PAGES)

    def lookup_each() -> None:
        check_filled(sum(ns.lookup(keys=[run]).pages for run in runs), PAGES)

    def load_all() -> None:
        check_filled(ns.load(keys=stored, out=out), PAGES)

    def load_each() -> None:
        filled = sum(ns.load(keys=[run], out=out[at : at + 1]) for at, run in enumerate(runs))
        check_filled(filled, PAGES)

    def store_all(keys: _Keys) -> None:
        check_filled(ns.store(keys=keys, pages=pages, timeout_s=_WAIT_S).stored, PAGES)

    def store_each(keys: _Keys) -> None:
        parts = ((_alone(keys, page), pages[page : page + 1]) for page in range(PAGES))
        taken = sum(
            ns.store(keys=[run], pages=part, timeout_s=_WAIT_S).stored for run, part in parts
        )
        check_filled(taken, PAGES)

    def of_new_pages(store: Callable[[_Keys], None]) -> float:
        bench.client.clear(ns.space)
        keys = _keys(next(seeds))
        return timed(lambda: store(keys))

    compared = [
        ("lookup", lambda: timed(lookup_all), lambda: timed(lookup_each)),
        ("load", lambda: timed(load_all), lambda: timed(load_each)),
        ("store", lambda: of_new_pages(store_all), lambda: of_new_pages(store_each)),
    ]
    return [_figure(bench.options.rounds, *each) for each in compared]


def _figure(
    rounds: int, what: str, in_one: Callable[[], float], one_by_one: Callable[[], float]
) -> Figure:
    both = alternate(rounds, in_one, one_by_one)
    return Figure(
        name=f"{what} of {PAGES:,} pages of 64 KiB in one call, a page",
        value=both.ours_s / PAGES * 1e6,
        unit="us",
        limit=both.limit_s / PAGES * 1e6,
        limit_name="a call for each page",
    )


def _keys(seed: int) -> _Keys:
    numbers = np.random.default_rng(seed)
    return [numbers.bytes(_KEY_BYTES) for _ in range(PAGES)]


def _alone(keys: _Keys, page: int) -> KeyRun:
    return KeyRun([keys[page]], page, keys[page - 1] if page else None)
