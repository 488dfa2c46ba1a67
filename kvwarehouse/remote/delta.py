"""What a node has put lately, as one object that is written once; others read it and find the pages
without a listing. Little-endian:

     0  magic "KVWDELT1"    8  u32 version 1       12  u32 entries
    16  fleet, 16 bytes    32  u64 node            40  u64 bytes put since the node's last delta
    48  entries of 48 bytes: namespace (16), key (16), u64 epoch, u32 day, u32 size in KiB
    then BLAKE2b-256 of all before

Whoever reads one believes nothing of it before its digest holds. What it says may be wrong all the
same, or old: an object is had when a get has it. Stateless; thread-safe.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvwarehouse.remote.names import ID_BYTES, PagesName

ENTRIES_MAX: Final = 8192
"""Of one delta; what is more goes into the next."""

_MAGIC: Final = b"KVWDELT1"
_VERSION: Final = 1
_HEAD: Final = struct.Struct(f"<8sII{ID_BYTES}sQQ")
_ENTRY: Final = struct.Struct(f"<{ID_BYTES}s{ID_BYTES}sQII")
_CHECK_BYTES: Final = 32

DELTA_BYTES_MAX: Final = _HEAD.size + ENTRIES_MAX * _ENTRY.size + _CHECK_BYTES


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    name: PagesName
    size_kib: int


@dataclass(frozen=True)
class Delta:
    """`put_bytes`: since the node's last delta, of entries that are in no delta too."""

    node: int
    put_bytes: int
    entries: Sequence[DeltaEntry]


def encode(fleet: bytes, delta: Delta) -> bytes:
    """`fleet`: 16 bytes. Raises ValueError for more than ENTRIES_MAX entries."""
    if len(delta.entries) > ENTRIES_MAX:
        raise ValueError(f"{len(delta.entries)} entries; a delta has {ENTRIES_MAX} at most")
    head = _HEAD.pack(_MAGIC, _VERSION, len(delta.entries), fleet, delta.node, delta.put_bytes)
    body = head + b"".join(
        _ENTRY.pack(
            entry.name.namespace, entry.name.key, entry.name.epoch, entry.name.day, entry.size_kib
        )
        for entry in delta.entries
    )
    return body + _checksum(body)


def decode(fleet: bytes, data: bytes | memoryview) -> Delta | None:
    """None: damaged, cut, of another fleet or of another version."""
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if len(body) < _HEAD.size or _checksum(body) != check:
        return None
    magic, version, count, owner, node, put_bytes = _HEAD.unpack_from(body)
    if (magic, version, owner) != (_MAGIC, _VERSION, fleet) or count > ENTRIES_MAX:
        return None
    if len(body) != _HEAD.size + count * _ENTRY.size:
        return None
    entries = [
        DeltaEntry(PagesName(namespace, epoch, day, key), size_kib)
        for namespace, key, epoch, day, size_kib in _ENTRY.iter_unpack(body[_HEAD.size :])
    ]
    return Delta(node, put_bytes, entries)


def _checksum(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()
