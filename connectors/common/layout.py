"""Where the blocks of a cache group lie in memory, as addresses and distances.

Immutable; thread-safe. Knows addresses; what they point into is kept alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw


@dataclass(frozen=True)
class BlockLayout:
    """Pieces of one block in one group: block b has, for each j, piece_bytes[j] bytes at
    bases[j] + b * strides[j]."""

    tensors: tuple[Any, ...]
    bases: NDArray[np.uint64]
    strides: NDArray[np.int64]
    piece_bytes: NDArray[np.uint64]
    name: str
    """A digest of shapes, types and order in memory; equal exactly where bytes mean the same."""

    @property
    def block_bytes(self) -> int:
        return int(self.piece_bytes.sum())

    def regions(self, blocks: Sequence[int]) -> kvw.Regions:
        """Those blocks as pages, in their order."""
        return kvw.Regions.strided(
            self.tensors,
            self.bases,
            self.strides,
            self.piece_bytes,
            np.asarray(blocks, np.int64).reshape(-1, 1),
        )
