"""Keys and memory objects, with what the connector uses of LMCache's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse_connectors.lmcache.chunks import ChunkLayout

RANK = 0x01000100


@dataclass(frozen=True)
class Key:
    """As lmcache.v1.distributed.api.ObjectKey."""

    chunk_hash: bytes
    model_name: str = "tiny"
    kv_rank: int = RANK
    object_group_id: int = 0
    cache_salt: str = ""


def keys(seed: int, count: int = 4, **fields: Any) -> list[Key]:
    return [
        Key(hashlib.sha256(f"{seed}/{number}".encode()).digest(), **fields)
        for number in range(count)
    ]


@dataclass
class Memory:
    """As a MemoryObj of LMCache's L1: tensors one after another, in one run of bytes."""

    shapes: list[tuple[int, ...]] = field(default_factory=lambda: [(2, 4, 16, 64)])
    dtypes: list[Any] = field(default_factory=lambda: [np.dtype(np.float16)])
    used_bytes: int | None = None
    """Where set_used_size has narrowed it."""

    def __post_init__(self) -> None:
        self.bytes: NDArray[np.uint8] = np.zeros(self.layout.size_bytes, np.uint8)

    @property
    def layout(self) -> ChunkLayout:
        return ChunkLayout.of(self.shapes, self.dtypes)

    @property
    def data_ptr(self) -> int:
        return self.bytes.ctypes.data

    def get_size(self) -> int:
        return len(self.bytes) if self.used_bytes is None else self.used_bytes

    def get_shapes(self) -> list[tuple[int, ...]]:
        return self.shapes

    def get_dtypes(self) -> list[Any]:
        return self.dtypes


def filled(seed: int, count: int = 4, **fields: Any) -> list[Memory]:
    memory = [Memory(**fields) for _ in range(count)]
    draw = np.random.default_rng(seed)
    for one in memory:
        one.bytes[:] = draw.integers(0, 256, len(one.bytes), np.uint8)
    return memory


def contents(memory: list[Memory]) -> list[bytes]:
    return [one.bytes.tobytes() for one in memory]
