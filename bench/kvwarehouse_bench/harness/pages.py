"""Pages whose bytes follow from what they are, so that any load can be judged without a record of
what was stored.

Every 4 KiB block opens with who it is (node, shard, version, place), so that a wrong one can be
named; the rest is noise seeded by the same. Stateless; thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BLOCK_WORDS = 4096 // 8
_MARK_WORDS = 4

Bytes = NDArray[np.uint8]


def page_of(node: int, shard: int, version: int, size_bytes: int) -> Bytes:
    """uint8 (size_bytes,)"""
    blocks = -(-size_bytes // 4096)
    noise = np.random.Philox(key=node << 64 | version << 32 | shard)
    words = noise.random_raw(blocks * _BLOCK_WORDS).reshape(blocks, _BLOCK_WORDS)
    words[:, 0], words[:, 1], words[:, 2] = node, shard, version
    words[:, 3] = np.arange(blocks)
    return words.reshape(-1).view(np.uint8)[:size_bytes]


def pages_of(nodes: Sequence[int], shard: int, version: int, size_bytes: int) -> Bytes:
    """uint8 (len(nodes), size_bytes)"""
    made = np.empty((len(nodes), size_bytes), np.uint8)
    for row, node in zip(made, nodes, strict=True):
        row[:] = page_of(node, shard, version, size_bytes)
    return made


def check_pages(loaded: Bytes, nodes: Sequence[int], shard: int, version: int) -> None:
    """AssertionError that says which block of which page is whose."""
    for place, node in enumerate(nodes):
        expected = page_of(node, shard, version, loaded.shape[1])
        if not np.array_equal(loaded[place], expected):
            at = int(np.argmax(loaded[place] != expected))
            start = at // 4096 * 4096
            mark = loaded[place][start : start + 8 * _MARK_WORDS].copy()
            found = mark.view(np.uint64).tolist() if mark.size == 8 * _MARK_WORDS else "?"
            raise AssertionError(
                f"wrong byte {at} in page {place} of a load: node {node} shard {shard} version "
                f"{version}; the block there says (node, shard, version, block) = {found}"
            )
