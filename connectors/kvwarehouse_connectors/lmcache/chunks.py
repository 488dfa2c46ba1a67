"""Chunks as LMCache passes them: their layout, and where they lie in its L1 memory.

A chunk is one run of bytes. Knows LMCache's objects only as things with data_ptr, get_size(),
get_shapes() and get_dtypes(), and its layouts as things with shapes and dtypes. Stateless.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ChunkLayout:
    """Of the tensors that a chunk has one after another."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    size_bytes: int

    @staticmethod
    def of(shapes: Iterable[Any], dtypes: Iterable[Any]) -> ChunkLayout:
        plain = tuple(tuple(int(side) for side in shape) for shape in shapes)
        types = tuple(dtypes)
        sizes = [
            math.prod(one) * int(dtype.itemsize) for one, dtype in zip(plain, types, strict=True)
        ]
        names = tuple(str(dtype).removeprefix("torch.") for dtype in types)
        return ChunkLayout(plain, names, sum(sizes))


def layout_of(description: Any) -> ChunkLayout:
    """Of LMCache's MemoryLayoutDesc."""
    return ChunkLayout.of(description.shapes, description.dtypes)


@dataclass(frozen=True)
class Chunk:
    """In memory that LMCache keeps for a task until the task is reported."""

    address: int
    layout: ChunkLayout


def chunk_of(memory: Any) -> Chunk | None:
    """Of LMCache's MemoryObj. None where it holds other bytes than its layout says, as what a serde
    has packed does: such a chunk could not be told from others of its layout."""
    layout = ChunkLayout.of(memory.get_shapes(), memory.get_dtypes())
    if memory.get_size() != layout.size_bytes or not layout.size_bytes:
        return None
    return Chunk(int(memory.data_ptr), layout)
