"""Who this warehouse is: its id and the secret that keys its chains, in a file `identity` of each
of its directories.

Format (docs/format.md): magic "KVWIDENT", version (u32 little-endian), id (16 bytes), secret
(192 bytes), blake2b-256 of all before. 0600, written whole or not at all. Never changed once
written: another secret would make every stored page unreachable.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import struct
from dataclasses import dataclass, field
from typing import Final

from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.whole_file import write_whole
from kvwarehouse.errors import StorageError

WAREHOUSE_ID_BYTES: Final = 16
SECRET_BYTES: Final = 192  # native/base/types.h; a test compares them
FILE_NAME: Final = "identity"

_MAGIC: Final = b"KVWIDENT"
_VERSION: Final = 1
_BODY: Final = struct.Struct(f"<8sI{WAREHOUSE_ID_BYTES}s{SECRET_BYTES}s")
_CHECK_BYTES: Final = 32


@dataclass(frozen=True)
class Identity:
    warehouse_id: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def create(cls) -> Identity:
        return cls(secrets.token_bytes(WAREHOUSE_ID_BYTES), secrets.token_bytes(SECRET_BYTES))


def establish(directories: list[str], log: Log) -> Identity:
    """The identity that all `directories` share: read from those that have it, written to those
    that have not, made when none has. Raises StorageError when they are of different warehouses,
    or when a file is damaged, readable by others, or cannot be written."""
    found = {path: identity for path in directories if (identity := _read(path)) is not None}
    identities = set(found.values())
    if len(identities) > 1:
        raise _differ(found)
    identity = identities.pop() if identities else Identity.create()
    for path in directories:
        if path not in found:
            _write(path, identity)
            event = Event.IDENTITY_ADOPTED if found else Event.IDENTITY_CREATED
            log.event(event, path=path, warehouse_id=identity.warehouse_id.hex())
    return identity


def _read(directory: str) -> Identity | None:
    path = os.path.join(directory, FILE_NAME)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    with open(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise _bad(path, f"is not a file of uid {os.geteuid()}")
        if facts.st_mode & 0o077:
            raise _bad(
                path,
                f"has mode {stat.S_IMODE(facts.st_mode):04o}, so others may have read the secret "
                f"in it; if they have not, run: chmod 600 {path}",
            )
        try:
            data = file.read(_BODY.size + _CHECK_BYTES + 1)
        except OSError as error:
            raise _unreadable(path, error) from error
    return _decode(path, data)


def _decode(path: str, data: bytes) -> Identity:
    fix = (
        "; copy the file from the warehouse's other directory, or, to give up what is stored "
        f"here, empty {os.path.dirname(path)}"
    )
    if len(data) != _BODY.size + _CHECK_BYTES:
        raise _bad(path, f"is damaged: it has {len(data)} bytes, not those of an identity{fix}")
    body, check = data[: _BODY.size], data[_BODY.size :]
    magic, version, warehouse_id, secret = _BODY.unpack(body)
    if magic != _MAGIC:
        raise _bad(path, f"is not an identity of a warehouse{fix}")
    if not secrets.compare_digest(_checksum(body), check):
        raise _bad(path, f"is damaged: its checksum does not hold{fix}")
    if version != _VERSION:
        raise _bad(path, f"has version {version}; this daemon knows {_VERSION}: use a newer one")
    return Identity(warehouse_id, secret)


def _write(directory: str, identity: Identity) -> None:
    path = os.path.join(directory, FILE_NAME)
    body = _BODY.pack(_MAGIC, _VERSION, identity.warehouse_id, identity.secret)
    try:
        write_whole(path, body + _checksum(body))
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}; make room, or name another directory",
            code="identity_unwritable",
            context={"path": path},
        ) from error


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()


def _differ(found: dict[str, Identity]) -> StorageError:
    owners = ", ".join(
        f"{path} belongs to warehouse {identity.warehouse_id.hex()}"
        for path, identity in found.items()
    )
    return StorageError(
        f"the directories are of different warehouses: {owners}; name the two that belong "
        "together, or an empty directory in place of the one you do not want",
        code="foreign_directory",
        context={path: identity.warehouse_id.hex() for path, identity in found.items()},
    )


def _unreadable(path: str, error: OSError) -> StorageError:
    return _bad(path, f"cannot be read: {error.strerror}")


def _bad(path: str, problem: str) -> StorageError:
    return StorageError(f"{path} {problem}", code="bad_identity", context={"path": path})
