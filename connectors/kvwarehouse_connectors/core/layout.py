"""Where the blocks of a cache group lie in memory, as addresses and distances.

Immutable; thread-safe. Knows addresses, in host memory or a device's; what they point into is kept
alive. A *view* is a tensor whose dimension 0 counts blocks; the others may lie in any order.
"""

from __future__ import annotations

import itertools
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


def pieces_of(view: Any) -> tuple[list[tuple[int, int, int]], str]:
    """(base, stride, bytes) of each contiguous piece of a block, in the order of memory, and what
    describes them."""
    item = view.element_size()
    inner = sorted(
        (
            (stride, size)
            for stride, size in zip(view.stride()[1:], view.shape[1:], strict=True)
            if size > 1
        ),
        reverse=True,
    )
    run = 1
    while inner and inner[-1][0] == run:
        run *= inner.pop()[1]
    block_stride = view.stride(0) * item
    offsets = [
        sum(place * stride for place, (stride, _) in zip(places, inner, strict=True))
        for places in itertools.product(*(range(size) for _, size in inner))
    ]
    pieces = [(view.data_ptr() + offset * item, block_stride, run * item) for offset in offsets]
    # The logical shape and the order of its dimensions in memory; not the distances, which depend
    # on how many blocks there are.
    wide = [d for d in range(1, view.dim()) if view.shape[d] > 1]
    rank = sorted(wide, key=lambda d: -view.stride(d))
    text = f"{view.dtype} {tuple(view.shape[1:])} {rank} {len(pieces)}x{run * item}"
    return pieces, text


def by_memory(view: Any) -> Any:
    """The view with its inner dimensions in the order of memory, as `pieces_of` has the pieces."""
    wide = [d for d in range(1, view.dim()) if view.shape[d] > 1]
    narrow = [d for d in range(1, view.dim()) if view.shape[d] == 1]
    return view.permute(0, *narrow, *sorted(wide, key=lambda d: -view.stride(d)))
