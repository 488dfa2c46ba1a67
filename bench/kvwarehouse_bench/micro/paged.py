"""A KV cache as engines keep one: for each layer a tensor of keys and one of values, and blocks
in no order. A page of the warehouse is one block of all of them: many pieces, far apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvwarehouse.client.regions import Regions, StridedRegions

LAYERS = 32
PIECES = 2 * LAYERS
_ALIGNMENT_BYTES = 64
"""Of a tensor of torch's in host memory (c10/core/alignment.h); an array of numpy's has 16, so that
each piece would share lines with its neighbours."""
_SPARE = 2  # blocks of the cache for each that is used: a page's neighbours are somebody else's


def paged_cache(pages: int, page_bytes: int) -> StridedRegions:
    """Room for `pages` pages of a multiple of PIECES bytes, in blocks chosen at random; the memory
    is really there."""
    blocks = _SPARE * pages
    piece_bytes = page_bytes // PIECES
    cache_bytes = PIECES * blocks * piece_bytes
    memory: Any = np.ones(cache_bytes + _ALIGNMENT_BYTES, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT_BYTES
    cache = memory[begin : begin + cache_bytes].reshape(PIECES, blocks, piece_bytes)
    base = cache.ctypes.data
    chosen = np.random.default_rng(5).permutation(blocks)[:pages]
    return Regions.strided(
        owners=[cache],
        bases=np.arange(PIECES, dtype=np.uint64) * np.uint64(cache.strides[0]) + np.uint64(base),
        strides=np.full(PIECES, piece_bytes, np.int64),
        piece_bytes=np.full(PIECES, piece_bytes, np.uint64),
        blocks=chosen.reshape(pages, 1).astype(np.int64),
    )
