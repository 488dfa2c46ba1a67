"""The memory that one call loads pages into, or stores them from: PageSlots.

PoolSlots are the host pool's own memory, without a copy. CopiedSlots go through SGLang's flat
pages, for pools that tell no addresses (states of state-space models in some layouts). FlatSlots
are a list of flat pages, as SGLang's older interface passes them.

One call owns its slots; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.sglang.memory import PieceMemory


class PageSlots(Protocol):
    def regions(self, part: int, begin: int = 0) -> kvw.Regions:
        """Its pages from `begin` on, of one part each."""
        ...

    def take(self, pages: int) -> None:
        """Says that the first `pages` of them were loaded."""
        ...


class PoolSlots:
    def __init__(self, memory: PieceMemory, pages: NDArray[np.int64]) -> None:
        self._memory = memory
        self._pages = pages

    def regions(self, part: int, begin: int = 0) -> kvw.Regions:
        return self._memory.regions(self._pages[begin:], part)

    def take(self, pages: int) -> None:
        return None


class FlatSlots:
    """tensors: one a page, contiguous, of equal sizes, in host memory."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = list(tensors)

    def regions(self, part: int, begin: int = 0) -> kvw.Regions:
        return kvw.Regions.strided(
            self.tensors,
            [0],
            [1],
            [self.tensors[0].nbytes],
            [[tensor.data_ptr()] for tensor in self.tensors[begin:]],
        )

    def take(self, pages: int) -> None:
        return None


class CopiedSlots(FlatSlots):
    """writes: whether the pool is written, so that its pages need not be read."""

    def __init__(self, pool: Any, pages: NDArray[np.int64], *, writes: bool) -> None:
        self._pool = pool
        self._slots = [int(page) * int(pool.page_size) for page in pages]
        if writes:
            super().__init__([pool.get_dummy_flat_data_page() for _ in self._slots])
        else:
            super().__init__([pool.get_data_page(slot).contiguous() for slot in self._slots])

    def take(self, pages: int) -> None:
        for slot, tensor in zip(self._slots[:pages], self.tensors, strict=False):
            self._pool.set_from_flat_data_page(slot, tensor)
