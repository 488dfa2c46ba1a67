"""vLLM's chunks as the warehouse has them: their names, and where their bytes lie in the rows of
vLLM's CPU tier.

A chunk is one page, stored alone: vLLM's keys say nothing of the chunk before. A row is as wide as
the widest cache group needs. What a group does not use of it holds bytes of whoever had the row
before, which may be of other users: so a page has the bytes of its group alone.

Knows addresses. Immutable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import kvwarehouse as kvw

_GROUP_BYTES = 4


@dataclass(frozen=True)
class RowGroup:
    """Where the chunks of a cache group lie in their rows. extents: offset and bytes of each piece,
    in order."""

    space: kvw.Namespace
    extents: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class TierChunk:
    """key: vLLM's. name: the warehouse's. row: in vLLM's CPU tier; of no meaning in a fetch."""

    key: bytes
    name: bytes
    group: RowGroup
    row: int = -1


def group_of(key: bytes) -> int:
    """The cache group of a key of vLLM's: a block hash, and the group in big endian."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def name_of(key: bytes, twist: bytes) -> bytes:
    """The block hash of a key, which names all tokens up to the chunk's end; twisted by what it
    leaves out, where there is any."""
    digest = key[:-_GROUP_BYTES]
    return hashlib.blake2b(digest, digest_size=32, key=twist).digest() if twist else digest


def runs(chunks: Sequence[TierChunk]) -> list[kvw.KeyRun]:
    return [kvw.KeyRun([chunk.name]) for chunk in chunks]


@dataclass(frozen=True)
class Rows:
    """vLLM's CPU tier: it stays mapped until the tier's shutdown has returned."""

    address: int
    row_bytes: int

    def regions(self, chunks: Sequence[TierChunk]) -> kvw.Regions:
        """Of chunks of one group, which have rows."""
        extents = chunks[0].group.extents
        return kvw.Regions.strided(
            (),
            [self.address + offset for offset, _ in extents],
            [self.row_bytes] * len(extents),
            [size for _, size in extents],
            np.array([[chunk.row] for chunk in chunks], np.int64),
        )
