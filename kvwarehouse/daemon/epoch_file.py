"""The clear epoch a second time, in a file `epoch` beside the ledger: what a clear removed must
stay away even when the ledger is lost, and then only the number of the last clear is needed.

Format (docs/format.md): magic "KVWEPOCH", version (u32 little-endian), warehouse id (16 bytes),
epoch (u64 little-endian), blake2b-256 of all before. 0600, written whole or not at all, before the
ledger.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import Final

from kvwarehouse.atomic_file import write_atomic
from kvwarehouse.errors import StorageError

FILE_NAME: Final = "epoch"

_MAGIC: Final = b"KVWEPOCH"
_VERSION: Final = 1
_BODY: Final = struct.Struct("<8sI16sQ")


def read(directory: str, warehouse_id: bytes) -> int:
    """The epoch, or 0 when there is no such file of this warehouse or it is damaged: the headers of
    segments and pages are asked as well. Raises StorageError for a newer version: writing over it
    would lose its clears."""
    path = os.path.join(directory, FILE_NAME)
    try:
        with open(path, "rb") as file:
            data = file.read(_BODY.size + 32)
    except OSError:
        return 0
    body = data[: _BODY.size]
    if len(body) < _BODY.size or _checksum(body) != data[_BODY.size :]:
        return 0
    magic, version, owner, epoch = _BODY.unpack(body)
    if magic == _MAGIC and version > _VERSION:
        raise StorageError(
            f"{path} has version {version}, and this daemon knows {_VERSION}; start the newer "
            "daemon that wrote it, or move the file away and lose its clears",
            code="newer_epoch",
            context={"path": path},
        )
    return int(epoch) if (magic, version, owner) == (_MAGIC, _VERSION, warehouse_id) else 0


def write(directory: str, warehouse_id: bytes, epoch: int) -> None:
    """Durable on return. Raises OSError; then the older epoch stands."""
    body = _BODY.pack(_MAGIC, _VERSION, warehouse_id, epoch)
    write_atomic(os.path.join(directory, FILE_NAME), body + _checksum(body))


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=32).digest()
