"""Verified loads of pages in DRAM, against a plain streaming copy of as many bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse import engine
from kvwarehouse.cli.bench.figures import GIGABYTE, Figure
from kvwarehouse.cli.bench.options import Bench, noise, prompt
from kvwarehouse.cli.bench.rounds import alternate, timed
from kvwarehouse.errors import CapacityError


def measure(bench: Bench) -> list[Figure]:
    options = bench.options
    ns = bench.open(options.page_bytes)
    pages, tokens = noise(options.pages, options.page_bytes), prompt(options.pages, seed=1)
    out = np.ones_like(pages)
    ns.store(tokens, pages, timeout_s=60)

    def ours() -> float:
        taken = timed(lambda: ns.load(tokens, out))
        check_filled(ns.lookup(tokens).pages, options.pages)
        return taken

    rounds = alternate(options.rounds, ours, lambda: copied(out, pages))
    bench.client.clear(ns.space)
    return [
        Figure(
            name="load from dram, verified",
            value=options.moved_bytes / rounds.ours_s / GIGABYTE,
            unit="GB/s",
            limit=options.moved_bytes / rounds.limit_s / GIGABYTE,
            limit_name="streaming copy",
            goal="ratio 0.6 or more",
            ratio_of_rounds=rounds.speed_ratio,
        )
    ]


def copied(to: NDArray[Any], source: NDArray[Any]) -> float:
    """Seconds of a plain streaming copy: the limit of this machine's memory for one thread."""
    return timed(lambda: engine.copy_streaming(to.reshape(-1), source.reshape(-1)))


def check_filled(pages: int, expected: int) -> None:
    """A bench of a warehouse that dropped its pages would measure nothing."""
    if pages != expected:
        raise CapacityError(
            f"the warehouse has {pages} of the bench's {expected} pages; give it more room, or use"
            " a smaller --bytes",
            code="bench_room",
        )
