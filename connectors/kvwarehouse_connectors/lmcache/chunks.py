"""Chunks as LMCache passes them: their layout, where they lie in its L1 memory, and their keys.

A chunk is one run of bytes. Knows LMCache's objects only as things with data_ptr, get_size(),
get_shapes() and get_dtypes(), and its layouts as things with shapes and dtypes.

A chunk's hash chains all chunks before it; it is used as it is. A user's salt (cache_salt) is
mixed into it: there may be as many as users, and a namespace each would be too many. Model, rank
and group are the namespace's (identity.py).

Stateless.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


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


LEAST_HASH_BYTES = 16
"""Shorter hashes (Python's own, to which LMCache falls back) may be the same for other tokens."""
_MOST_HASH_BYTES = 64


class ObjectKey(Protocol):
    """What is used of LMCache's, which are hashable."""

    def __hash__(self) -> int: ...
    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


def page_key(key: ObjectKey) -> bytes | None:
    """16 to 64 bytes; None where the hash is too short to tell chunks apart."""
    digest = key.chunk_hash
    if len(digest) < LEAST_HASH_BYTES:
        return None
    if not key.cache_salt and len(digest) <= _MOST_HASH_BYTES:
        return digest
    salt = key.cache_salt.encode()
    mixed = hashlib.blake2b(digest_size=32, person=b"kvw lmcache salt")
    mixed.update(len(salt).to_bytes(4, "little") + salt + digest)
    return mixed.digest()
