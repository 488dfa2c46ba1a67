"""What a measure is given: how much to move, a connected client, and a KV cache as engines keep
one.

The cache has for each layer a tensor of keys and one of values, and blocks in no order. A page of
the warehouse is one block of all of them: many pieces, far apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client import Client, OpenNamespace
from kvwarehouse.client.regions import Regions, StridedRegions
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse.types import Namespace

PAGE_TOKENS = 16

LAYERS = 32
PIECES = 2 * LAYERS
_ALIGNMENT_BYTES = 64
"""Of a tensor of torch's in host memory (c10/core/alignment.h); an array of numpy's has 16, so that
each piece would share lines with its neighbours."""
_SPARE = 2  # blocks of the cache for each that is used: a page's neighbours are somebody else's


@dataclass(frozen=True)
class Sizes:
    """How large things are in the measures that vary it; all in rising order."""

    page_bytes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 8 << 20)
    """Of loads and stores: small models with short blocks to large ones with long blocks."""
    remote_page_bytes: tuple[int, ...] = (64 << 10, 2 << 20, 8 << 20)
    """Of a remote tier: packed into an object, a few in one, two in the largest."""
    filter_keys: int = 10_000_000
    """Of objects that a remote tier's filter says are there."""
    stored: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    """Small pages in a daemon."""
    indexed: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
    """Entries of an index without a daemon."""
    looked_up: tuple[int, ...] = (16, 64, 256, 1_024, 4_096, 16_384, 65_536)
    """Pages of a prompt; the last is the longest that there may be."""
    loaded: tuple[int, ...] = (1, 10, 100, 1_000, 10_000)
    """Pages of 64 KiB of a prompt."""
    sessions: tuple[int, ...] = (1, 4, 16, 64, 256)
    stepped: int = 1_000_000
    """Tiny pages in a daemon while its longest steps are looked for."""
    turn_s: float = 1.0
    """Of each client in a crowd, with each kind of work."""
    idle_s: float = 10.0
    soak_minutes: float = 2.0


@dataclass(frozen=True)
class Options:
    rounds: int
    page_bytes: int
    pages: int
    """Moved in a round."""
    nvme_dir: str | None
    sizes: Sizes = Sizes()
    remote: str = ""
    """URL of a store of the user's; empty: a folder in memory."""
    remote_config: str = ""
    """The file that says how it is reached, as serve takes it; empty: none."""

    @property
    def moved_bytes(self) -> int:
        return self.page_bytes * self.pages

    def pages_of(self, page_bytes: int) -> int:
        """As many bytes a round, in pages of another size."""
        return max(1, self.moved_bytes // page_bytes)

    @property
    def dram_bytes(self) -> int:
        """Room for two rounds beside what reservations and the free list keep to themselves."""
        return max(3 * self.moved_bytes, 256 << 20)

    @property
    def nvme_bytes(self) -> int:
        """Few rounds fill it, so that its files are written again and again as those of a tier in
        use are; and eight segments of it hold a page each with room to spare."""
        return max(4 * self.moved_bytes, 32 * self.page_bytes, 64 << 20)


@dataclass(frozen=True)
class Bench:
    options: Options
    client: Client
    daemon: PrivateDaemon | None
    """None where the daemon is the user's."""
    folder: str | None
    """On the disk of the NVMe tier, for the measure that has one."""

    def open(self, page_bytes: int) -> OpenNamespace:
        """The bench's own namespace for such pages, empty."""
        return open_bench(self.client, page_bytes)


def open_bench(client: Client, page_bytes: int) -> OpenNamespace:
    """The bench's own namespace for such pages, empty. Always the same one, because a warehouse
    remembers every namespace it has met."""
    space = bench_space(page_bytes)
    ns = client.open(space)
    client.clear(space)
    return ns


def bench_space(page_bytes: int) -> Namespace:
    return Namespace(
        model="kvwarehouse-bench",
        weights="noise",
        dtype="uint8",
        layout="bench/1",
        page_tokens=PAGE_TOKENS,
        page_bytes=page_bytes,
    )


def prompt(pages: int, seed: int) -> NDArray[np.uint32]:
    """Token ids of `pages` whole pages; equal for an equal seed."""
    numbers = np.random.default_rng(seed)
    return numbers.integers(0, 150_000, pages * PAGE_TOKENS, dtype=np.uint32)


def noise(pages: int, page_bytes: int) -> NDArray[Any]:
    """Page buffers whose memory is really there: noise, so that no zero page is shared."""
    return np.random.default_rng(7).integers(0, 256, (pages, page_bytes), dtype=np.uint8)


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
