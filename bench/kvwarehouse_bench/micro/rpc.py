"""What gRPC costs beside shared memory: one lookup, and KV in chunks."""

from __future__ import annotations

from itertools import count

import numpy as np

from kvwarehouse.client import OpenNamespace
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse_bench.harness.alternation import Rounds, alternate, timed
from kvwarehouse_bench.micro.figures import GIGABYTE, Figure
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.options import Bench, noise, prompt

_CALLS = 20


def measure(bench: Bench) -> list[Figure]:
    with connect_grpc(bench.client.address) as client:
        shared = bench.open(bench.options.page_bytes)
        remote = client.open(shared.space)
        figures = [_lookups(bench, remote, shared), *_streams(bench, remote, shared)]
        client.clear(shared.space)
    return figures


def _lookups(bench: Bench, remote: OpenNamespace, shared: OpenNamespace) -> Figure:
    tokens = prompt(bench.options.pages, seed=1)
    rounds = alternate(
        bench.options.rounds,
        lambda: timed(lambda: remote.lookup(tokens), _CALLS),
        lambda: timed(lambda: shared.lookup(tokens), _CALLS),
    )
    return Figure(
        name=f"lookup of {bench.options.pages:,} pages over gRPC",
        value=rounds.ours_s * 1e6,
        unit="us",
        limit=rounds.limit_s * 1e6,
        limit_name="the same in shared memory",
    )


def _streams(bench: Bench, remote: OpenNamespace, shared: OpenNamespace) -> list[Figure]:
    options = bench.options
    pages = noise(options.pages, options.page_bytes)
    out = np.ones_like(pages)
    seeds = count(2)

    def store(ns: OpenNamespace) -> float:
        bench.client.clear(ns.space)
        tokens = prompt(options.pages, seed=next(seeds))
        taken = timed(lambda: ns.store(tokens, pages, timeout_s=60))
        check_filled(ns.lookup(tokens).pages, options.pages)
        return taken

    stores = alternate(options.rounds, lambda: store(remote), lambda: store(shared))
    bench.client.clear(shared.space)
    tokens = prompt(options.pages, seed=1)
    shared.store(tokens, pages, timeout_s=60)
    check_filled(shared.lookup(tokens).pages, options.pages)
    loads = alternate(
        options.rounds,
        lambda: timed(lambda: remote.load(tokens, out, timeout_s=60)),
        lambda: timed(lambda: shared.load(tokens, out, timeout_s=60)),
    )
    return [
        _figure("store over gRPC", options.moved_bytes, stores),
        _figure("load over gRPC", options.moved_bytes, loads),
    ]


def _figure(name: str, moved_bytes: int, rounds: Rounds) -> Figure:
    return Figure(
        name=name,
        value=moved_bytes / rounds.ours_s / GIGABYTE,
        unit="GB/s",
        limit=moved_bytes / rounds.limit_s / GIGABYTE,
        limit_name="the same in shared memory",
        ratio_of_rounds=rounds.speed_ratio,
    )
