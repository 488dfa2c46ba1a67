"""What verification costs: the same loads from DRAM with the page digest and without, and the
digest's share of a load from NVMe. No store goes without its digest: `bench store`, against a plain
copy, bounds what it costs there."""

from __future__ import annotations

import numpy as np

from kvwarehouse import core
from kvwarehouse.client import connect
from kvwarehouse.errors import UsageError
from kvwarehouse_bench.harness.alternation import alternate, timed
from kvwarehouse_bench.micro.figures import GIGABYTE, Figure
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.nvme import loads_from_nvme
from kvwarehouse_bench.micro.options import Bench, noise, prompt

_KEY = bytes(16)


def measure(bench: Bench) -> list[Figure]:
    if bench.daemon is None:
        raise UsageError("verify measures a private daemon only", code="bad_bench")
    found = [_dram(bench, bench.daemon.address)]
    return [*found, _nvme(bench)] if bench.folder else found


def _dram(bench: Bench, address: str) -> Figure:
    """Of pages that were never re-attached, so that `boundary` has none to verify."""
    options = bench.options
    verified = bench.open(options.page_bytes)
    pages, tokens = noise(options.pages, options.page_bytes), prompt(options.pages, seed=1)
    out = np.ones_like(pages)
    verified.store(tokens, pages, timeout_s=60)
    with connect(address, verify="boundary") as client:
        trusting = client.open(verified.space)
        check_filled(trusting.load(tokens, out), options.pages)
        rounds = alternate(
            options.rounds,
            lambda: timed(lambda: verified.load(tokens, out)),
            lambda: timed(lambda: trusting.load(tokens, out)),
        )
    bench.client.clear(verified.space)
    return Figure(
        name="load from dram, verified",
        value=options.moved_bytes / rounds.ours_s / GIGABYTE,
        unit="GB/s",
        limit=options.moved_bytes / rounds.limit_s / GIGABYTE,
        limit_name="the same loads without the digest",
        goal="ratio 0.75 or more",
        ratio_of_rounds=rounds.speed_ratio,
    )


def _nvme(bench: Bench) -> Figure:
    options = bench.options
    pages = noise(options.pages, options.page_bytes)
    load = loads_from_nvme(bench, bench.open(options.page_bytes))
    rounds = alternate(
        options.rounds,
        lambda: timed(lambda: [core.page_digest(page, _KEY, 0) for page in pages]),
        lambda: load().seconds,
    )
    return Figure(
        name="digest alone, seconds of a round",
        value=rounds.ours_s,
        unit="s",
        limit=rounds.limit_s,
        limit_name="load from nvme, whole",
        goal="ratio 0.15 or less",
        ratio_of_rounds=1 / rounds.speed_ratio,
    )
