"""Lookups of a long prompt: no call to the daemon, so hashing is the floor where all is stored, and
a call is what a miss does not cost."""

from __future__ import annotations

import numpy as np

from kvwarehouse import core
from kvwarehouse.client import OpenNamespace
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.errors import CapacityError
from kvwarehouse_bench.harness.alternation import alternate, p50
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.options import PAGE_TOKENS, Bench, noise, prompt

PAGES = 2048
_PAGE_BYTES = 4096
_CALLS = 50
_GOAL_US = 100
_MISS_GOAL_US = 15


def measure(bench: Bench) -> list[Figure]:
    ns = bench.open(_PAGE_BYTES)
    tokens = prompt(PAGES, seed=1)
    ns.store(tokens, noise(PAGES, _PAGE_BYTES), timeout_s=60)
    found = ns.lookup(tokens).pages
    if found != PAGES:
        raise CapacityError(
            f"only {found} of the bench's {PAGES} pages fit into this warehouse; give it more room",
            code="bench_room",
        )
    secret = np.random.default_rng(2).bytes(core.SECRET_BYTES)

    def ours() -> float:
        return p50(lambda: ns.lookup(tokens), _CALLS)

    def hashing() -> float:
        return p50(lambda: core.chain_keys(secret, ns.space.id, tokens, PAGE_TOKENS), _CALLS)

    rounds = alternate(bench.options.rounds, ours, hashing)
    missed = _missed(bench, ns)
    bench.client.clear(ns.space)
    return [
        Figure(
            name=f"lookup of {PAGES:,} pages, all stored, p50",
            value=rounds.ours_s * 1e6,
            unit="us",
            limit=rounds.limit_s * 1e6,
            limit_name="hashing the tokens alone",
            goal=f"under {_GOAL_US} us",
        ),
        missed,
    ]


def _missed(bench: Bench, ns: OpenNamespace) -> Figure:
    tokens = prompt(PAGES, seed=3)
    with connect_grpc(bench.client.address) as client:
        remote = client.open(ns.space)
        rounds = alternate(
            bench.options.rounds,
            lambda: p50(lambda: ns.lookup(tokens), _CALLS),
            lambda: p50(lambda: remote.lookup(tokens[:PAGE_TOKENS]), _CALLS),
        )
    return Figure(
        name="lookup whose first page misses, p50",
        value=rounds.ours_s * 1e6,
        unit="us",
        limit=rounds.limit_s * 1e6,
        limit_name="a gRPC call",
        goal=f"under {_MISS_GOAL_US} us",
    )
