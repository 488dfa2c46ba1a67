"""Lookups of long prompts that only the store has, as a full filter says, against lookups of as
many pages in DRAM by a client of a daemon without the tier; of prompts whose first page is nowhere,
against the same there; and what the filter takes of memory.

No lookup asks the store, so the objects need not be there: the filter is filled before its daemon
starts, as one is that its predecessor has left. Prompts take turns, so that no call finds all of
its words where the last one left them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse import core
from kvwarehouse.client import OpenNamespace
from kvwarehouse.daemon.remote_tier import filter_objects
from kvwarehouse_bench.harness.alternation import Rounds, alternate, p50
from kvwarehouse_bench.harness.lone_host import LoneDaemon
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.load import check_filled
from kvwarehouse_bench.micro.options import (
    PAGE_TOKENS,
    Options,
    bench_space,
    noise,
    open_bench,
    prompt,
)
from kvwarehouse_bench.micro.private import private_daemon
from kvwarehouse_bench.micro.process import taken_bytes
from kvwarehouse_bench.micro.remote_host import remote_host
from kvwarehouse_bench.micro.remote_store import BenchStore, bench_store

PAGES = 2048
_PROMPTS = 4
_CALLS = 60
_GOAL = "ratio 1.25 or less"
_MEMORY_GOAL = "under 2.5 bytes a key"

_SMALL_BYTES, _LARGE_BYTES = 4096, 16 << 20
_OBJECT_PAGES = {_SMALL_BYTES: 16, _LARGE_BYTES: 1}
"""Pages of an object, by their size: at most 256 tokens and 16 MiB."""

_DRAM_BYTES = 128 << 20
_OBJECT_BYTES = 4 << 20
"""A filter has room for as many objects of that size as the capacity holds."""
_TTL_DAYS = 7
_DAY_S = 86_400
_KEYS_AT_ONCE = 1_000_000
_KEY_BYTES = 16


def lookups(options: Options) -> list[Figure]:
    keys = options.sizes.filter_keys
    with bench_store(dataclasses.replace(options, remote=""), 4 * _DRAM_BYTES) as made:
        settings = {
            "dram": _DRAM_BYTES,
            "remote_capacity": keys * _OBJECT_BYTES,
            "remote_ttl": f"{_TTL_DAYS}d",
        }

        def prepare(daemon: LoneDaemon) -> None:
            fill_filter(made, daemon, keys)

        with (
            remote_host(made, settings, prepare) as host,
            private_daemon({"dram": _DRAM_BYTES}) as (_, client),
        ):
            plain = open_bench(client, _SMALL_BYTES)
            for tokens in _prompts():
                plain.store(tokens, noise(PAGES, _SMALL_BYTES), timeout_s=60)
                check_filled(plain.lookup(tokens).by_tier["dram"], PAGES)
            found = []
            for page_bytes, object_pages in _OBJECT_PAGES.items():
                ns = host.open(page_bytes)
                for tokens in _prompts():
                    host.until_remote(ns, tokens, PAGES)
                each = f"{object_pages} pages each" if object_pages > 1 else "a page each"
                found.append(
                    _figure(
                        f"lookup of {PAGES:,} pages in a remote store, objects of {each}, p50",
                        _compared(options, ns, plain, _prompts()),
                        "the same in DRAM, without the tier",
                    )
                )
            nowhere = [prompt(PAGES, seed=1000 + seed) for seed in range(_PROMPTS)]
            found.append(
                _figure(
                    "lookup whose first page misses, with a remote store, p50",
                    _compared(options, host.open(_SMALL_BYTES), plain, nowhere),
                    "the same without the tier",
                )
            )
            taken = taken_bytes(host.daemon.arena_dir, "presence")
    return [
        *found,
        Figure(
            f"memory of the filter, {keys:,} keys",
            taken / keys,
            "bytes a key",
            goal=_MEMORY_GOAL,
        ),
    ]


def fill_filter(made: BenchStore, daemon: LoneDaemon, keys: int) -> None:
    """As the daemon's worker would have it, which keeps it: with all objects of the prompts, and
    others up to so many keys."""
    daemon.arena_dir.mkdir(mode=0o700)
    today = int(time.time()) // _DAY_S
    objects = filter_objects(keys * _OBJECT_BYTES)
    path = str(daemon.arena_dir / "presence")
    presence = core.PresenceFile(path, made.secret.fleet_id, objects, _TTL_DAYS + 1, today)
    numbers = np.random.default_rng(11)
    try:
        ours = np.concatenate([_keys(made, page_bytes) for page_bytes in _OBJECT_PAGES])
        _put(presence, ours.tobytes(), today)
        left = keys - len(ours)
        while left > 0:
            some = min(left, _KEYS_AT_ONCE)
            _put(presence, numbers.bytes(some * _KEY_BYTES), today)
            left -= some
    finally:
        presence.close()


def _put(presence: core.PresenceFile, keys: bytes, today: int) -> None:
    many = len(keys) // _KEY_BYTES
    presence.put(keys, np.zeros(many, np.uint64), np.full(many, today, np.uint32))


def _keys(made: BenchStore, page_bytes: int) -> NDArray[np.uint8]:
    """Of the objects of all prompts: those of their last pages."""
    secret, space = made.secret.secret, bench_space(page_bytes)
    every = _OBJECT_PAGES[page_bytes]
    return np.concatenate(
        [
            core.chain_keys(secret, space.id, tokens, PAGE_TOKENS)[every - 1 :: every]
            for tokens in _prompts()
        ]
    )


def _prompts() -> list[NDArray[Any]]:
    return [prompt(PAGES, seed=seed) for seed in range(_PROMPTS)]


def _compared(
    options: Options, ns: OpenNamespace, plain: OpenNamespace, prompts: Sequence[NDArray[Any]]
) -> Rounds:
    def looked_up(by: OpenNamespace) -> float:
        turns = cycle(prompts)
        return p50(lambda: by.lookup(next(turns)), _CALLS)

    return alternate(options.rounds, lambda: looked_up(ns), lambda: looked_up(plain))


def _figure(name: str, rounds: Rounds, limit_name: str) -> Figure:
    return Figure(
        name=name,
        value=rounds.ours_s * 1e6,
        unit="us",
        limit=rounds.limit_s * 1e6,
        limit_name=limit_name,
        goal=_GOAL,
    )
