"""Pages of many shapes in a device's memory, in pieces that lie anyhow, are what a processor
digests and copies them as: run over the contract model of the driver by tests/integration, and
over a real GPU by tests/gpu. A test class inherits it and has the fixtures `device`, `client` and
`rng`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw

PAGES, PAGE_TOKENS = 9, 4
PAGE_BYTES = (3, 200, 4096, 12288, 70001, 262144, 300000)
PIECES = (1, 2, 7, 16)
SHIFTS = (0, 8, 16, 5)
"""Of each piece from a multiple of 16 bytes: as engines have them, and as nobody has."""


class Scattered:
    """PAGES pages in blocks of a device's memory; every piece has a region of its own."""

    def __init__(
        self, device: Any, page_bytes: int, pieces: int, shift: int, rng: random.Random
    ) -> None:
        cuts = sorted(rng.sample(range(1, page_bytes), min(pieces, page_bytes) - 1))
        if rng.random() < 0.5:
            cuts = sorted({cut // 4096 * 4096 for cut in cuts} - {0})
        edges = [0, *cuts, page_bytes]
        self.sizes = [end - begin for begin, end in itertools.pairwise(edges)]
        self.strides = [-(-size // 16) * 16 + 16 for size in self.sizes]
        self.table = rng.sample(range(PAGES + 3), PAGES)
        self.starts = np.cumsum([0, *(stride * (PAGES + 3) + 16 for stride in self.strides)])
        self.shift, self.device = shift, device
        self.memory = device.array(np.full((1, int(self.starts[-1]) + 16), 0xA5, np.uint8))

    def _places(self) -> Iterator[tuple[int, slice, int, int]]:
        """(page, its part, where that lies, bytes)"""
        for page, block in enumerate(self.table):
            begin = 0
            for start, stride, size in zip(self.starts, self.strides, self.sizes, strict=False):
                at = int(start) + self.shift + block * stride
                yield page, slice(begin, begin + size), at, size
                begin += size

    def fill(self, rows: Any) -> None:
        held = np.array(self.device.read(self.memory))
        for page, part, at, size in self._places():
            held[0, at : at + size] = rows[page, part]
        self.close()
        self.memory = self.device.array(held)

    def close(self) -> None:
        self.device.free(self.memory)

    def rows(self, page_bytes: int) -> Any:
        """And nothing beside the pieces was touched."""
        held = self.device.read(self.memory)
        rows = np.zeros((PAGES, page_bytes), np.uint8)
        for page, part, at, size in self._places():
            rows[page, part] = held[0, at : at + size]
            held[0, at : at + size] = 0xA5
        assert (held == 0xA5).all()
        return rows

    def regions(self) -> Any:
        base = self.device.address(self.memory) + self.shift
        bases = [base + int(start) for start in self.starts[:-1]]
        table = [[block] for block in self.table]
        return kvw.Regions.strided(
            [self.memory], bases, self.strides, self.sizes, table
        ).on_device()


class ShapeSuite:
    @pytest.mark.parametrize("shift", SHIFTS)
    @pytest.mark.parametrize("page_bytes", PAGE_BYTES)
    def test_pages_of_any_shape_are_what_a_processor_makes_of_them(
        self, client: Any, device: Any, rng: random.Random, page_bytes: int, shift: int
    ) -> None:
        space = kvw.Namespace(
            model="shapes",
            weights=str(shift),
            dtype="uint8",
            layout="test/1",
            page_tokens=PAGE_TOKENS,
            page_bytes=page_bytes,
        )
        ns = client.open(space)
        for pieces in PIECES:
            tokens = [rng.randrange(1 << 20) for _ in range(PAGES * PAGE_TOKENS)]
            noise = np.frombuffer(rng.randbytes(PAGES * page_bytes), np.uint8)
            rows = noise.reshape(PAGES, page_bytes)
            source = Scattered(device, page_bytes, pieces, shift, rng)
            source.fill(rows)
            assert ns.store(tokens, source.regions()).stored == PAGES
            on_host = np.zeros_like(rows)
            assert ns.load(tokens, on_host) == PAGES  # a processor's digests are the device's
            assert np.array_equal(on_host, rows)
            target = Scattered(device, page_bytes, rng.choice(PIECES), rng.choice(SHIFTS), rng)
            assert ns.load(tokens, target.regions()) == PAGES
            assert np.array_equal(target.rows(page_bytes), rows)
            source.close()
            target.close()
        client.clear(space)
