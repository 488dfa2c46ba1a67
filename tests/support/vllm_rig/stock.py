"""The bytes that a warehouse has of a prompt, read by a client of its own under vLLM's keys, and
where they lie in its files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from testkit.damage import Place, find
from vllm_rig.pair import Pair

Bytes = NDArray[np.uint8]

PREFIX, WINDOW, STATE = "prefix", "window", "state"
"""Rules of cache groups, as the connector names them in a namespace."""


class Page(NamedTuple):
    """Of a prompt: in the cache group of that name, which rank's, and which block."""

    rule: str
    group: str
    shard: int
    block: int


def block_keys(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """vLLM's own hashes of a prompt's whole blocks, by its default algorithm."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(sha256)
    keys: list[bytes] = []
    for begin in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = keys[-1] if keys else None
        block = tuple(tokens[begin : begin + block_tokens])
        keys.append(kv_cache_utils.hash_block_tokens(sha256, parent, block, None))
    return keys


def stock(pair: Pair, tokens: Sequence[int]) -> dict[Page, Bytes]:
    """Every page that is stored of these tokens, in all groups and of all ranks. Each is verified
    on the way."""
    found: dict[Page, Bytes] = {}
    with pair.daemon.connect() as client:
        for space in pair.stored_pages.spaces():
            rule = space.extra["rule"].split("/")[0]
            keys = block_keys(tokens, space.page_tokens)
            opened = client.open(space)
            for shard in range(space.shards):
                for block, page in _pages(opened, keys, rule == PREFIX, shard).items():
                    found[Page(rule, space.cache_group, shard, block)] = page
    return found


def _pages(
    opened: kvw.OpenNamespace, keys: list[bytes], chained: bool, shard: int
) -> dict[int, Bytes]:
    rows = np.zeros((len(keys), opened.space.page_bytes), np.uint8)
    if chained:
        return dict(enumerate(rows[: opened.load(keys=keys, out=rows, shard=shard)]))
    return {
        block: rows[block]
        for block, key in enumerate(keys)
        if opened.load(keys=[kvw.KeyRun([key])], out=rows[block : block + 1], shard=shard)
    }


def differing(one: dict[Page, Bytes], other: dict[Page, Bytes]) -> list[Page]:
    """Pages that only one has, or whose bytes differ."""
    return sorted(
        page
        for page in one.keys() | other.keys()
        if page not in one or page not in other or not np.array_equal(one[page], other[page])
    )


def copies(pair: Pair, page: Bytes) -> list[Place]:
    """Where a page lies, in DRAM and on NVMe."""
    assert pair.stored_pages.client.flush().pending == 0
    return find([pair.daemon.arena_dir / "arena", *pair.daemon.segments], page)
