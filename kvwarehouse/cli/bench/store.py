"""Stores of new pages with their digests, against a plain streaming copy of as many bytes."""

from __future__ import annotations

from itertools import count

import numpy as np

from kvwarehouse.cli.bench.figures import GIGABYTE, Figure
from kvwarehouse.cli.bench.load import check_filled, copied
from kvwarehouse.cli.bench.options import Bench, noise, prompt
from kvwarehouse.cli.bench.rounds import alternate, timed


def measure(bench: Bench) -> list[Figure]:
    options = bench.options
    ns = bench.open(options.page_bytes)
    pages = noise(options.pages, options.page_bytes)
    other = np.ones_like(pages)
    seeds = count(1)

    def ours() -> float:
        bench.client.clear(ns.space)
        tokens = prompt(options.pages, seed=next(seeds))
        taken = timed(lambda: ns.store(tokens, pages, timeout_s=60))
        check_filled(ns.lookup(tokens).pages, options.pages)
        return taken

    rounds = alternate(options.rounds, ours, lambda: copied(other, pages))
    bench.client.clear(ns.space)
    return [
        Figure(
            name="store to dram, with digest",
            value=options.moved_bytes / rounds.ours_s / GIGABYTE,
            unit="GB/s",
            limit=options.moved_bytes / rounds.limit_s / GIGABYTE,
            limit_name="streaming copy",
            goal="ratio 0.6 or more",
            ratio_of_rounds=rounds.speed_ratio,
        )
    ]
