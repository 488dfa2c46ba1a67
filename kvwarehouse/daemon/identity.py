"""Who this warehouse is: its id and the secret that keys its chains, in two files of each of its
directories, `identity` and `identity.copy`. Any one of them that is good mends the others.

Format (docs/format.md): magic "KVWIDENT", version (u32 little-endian), id (16 bytes), secret
(192 bytes), blake2b-256 of all before. 0600, written whole or not at all. Never changed once
written: another secret would make every stored page unreachable.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import struct
from dataclasses import dataclass, field
from typing import Final

from kvwarehouse.atomic_file import write_atomic
from kvwarehouse.daemon.directories import segment_files
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.errors import StorageError
from kvwarehouse.fleet import SECRET_BYTES, FleetSecret

WAREHOUSE_ID_BYTES: Final = 16
FILE_NAMES: Final = ("identity", "identity.copy")  # older daemons know the first alone

_MAGIC: Final = b"KVWIDENT"
_VERSION: Final = 1
_BODY: Final = struct.Struct(f"<8sI{WAREHOUSE_ID_BYTES}s{SECRET_BYTES}s")
_HEAD: Final = struct.Struct("<8sI")  # stays in all versions, as the checksum at the end does
_CHECK_BYTES: Final = 32
_READ_BYTES: Final = 1 << 16  # more than an identity of any version has
_HEAD_BYTES: Final = 4096  # of other files: the id is in it
_BAD_MEDIUM: Final = {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA}


@dataclass(frozen=True)
class WarehouseIdentity:
    warehouse_id: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def create(cls, fleet: FleetSecret | None) -> WarehouseIdentity:
        secret = fleet.secret if fleet else secrets.token_bytes(SECRET_BYTES)
        return cls(secrets.token_bytes(WAREHOUSE_ID_BYTES), secret)

    @property
    def fleet(self) -> FleetSecret:
        """Who has the same makes the same keys. With a random secret that is nobody else."""
        return FleetSecret(self.secret)


class _DamagedError(Exception):
    """A copy that cannot be believed. `problem` follows its path in a sentence."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


def is_in(directory: str) -> bool:
    """True if `directory` has a copy, good or not."""
    return any(os.path.lexists(path) for path in _paths(directory))


def establish(
    directories: list[str], log: Log, fleet: FleetSecret | None = None
) -> WarehouseIdentity:
    """The identity that all `directories` share, made when none has one, with the secret of `fleet`
    or a random one. Each directory is given the copies that it lacks, and good ones in place of
    those that are damaged.

    Raises StorageError, before anything is written, when no copy is good and one is damaged, when
    the directories are of different warehouses (one without a good copy is of whose id its other
    files have), when their secret is not that of `fleet`, or when a copy is readable by others or
    of a newer version; and when a directory that has no copy cannot be given one. Any other copy
    that cannot be written is said in the log alone."""
    copies = {path: _look(path) for directory in directories for path in _paths(directory)}
    good = {path: copy for path, copy in copies.items() if isinstance(copy, WarehouseIdentity)}
    damaged = {path: copy for path, copy in copies.items() if isinstance(copy, _DamagedError)}
    if len(set(good.values())) > 1:
        raise _differ(good)
    if damaged and not good:
        raise _none_good(damaged)
    identity = next(iter(good.values())) if good else WarehouseIdentity.create(fleet)
    if fleet and identity.fleet != fleet:
        raise _of_another_fleet(list(good), identity.fleet, fleet)
    for directory in directories:
        if good and not any(path in good for path in _paths(directory)):
            _refuse_others(directory, identity)
    for directory in directories:
        first, *_ = paths = _paths(directory)
        if all(copies[path] is None for path in paths):
            _write_first(first, identity)
            event = Event.IDENTITY_ADOPTED if good else Event.IDENTITY_CREATED
            log.event(event, path=directory, warehouse_id=identity.warehouse_id.hex())
            copies[first] = identity
        elif copies[first] is None:
            copies[first] = _DamagedError("is missing")
        for path in paths:
            _mend(path, copies[path], identity, log)
    return identity


def _paths(directory: str) -> list[str]:
    return [os.path.join(directory, name) for name in FILE_NAMES]


def _look(path: str) -> WarehouseIdentity | _DamagedError | None:
    try:
        return _read(path)
    except _DamagedError as damage:
        return damage


def _read(path: str) -> WarehouseIdentity | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                raise _bad(path, f"is not a file of uid {os.geteuid()}")
            if facts.st_mode & 0o077:
                raise _bad(
                    path,
                    f"has mode {stat.S_IMODE(facts.st_mode):04o}, so others may have read the "
                    f"secret in it; if they have not, run: chmod 600 {path}",
                )
            data = file.read(_READ_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        if error.errno in _BAD_MEDIUM:
            raise _DamagedError(problem) from error
        raise _bad(path, problem) from error
    return _decode(path, data)


def _decode(path: str, data: bytes) -> WarehouseIdentity:
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if not secrets.compare_digest(_checksum(body), check):
        raise _DamagedError(f"is damaged: the checksum of its {len(data)} bytes does not hold")
    magic, version = _HEAD.unpack(body[: _HEAD.size].ljust(_HEAD.size, b"\0"))
    if magic != _MAGIC:
        raise _DamagedError("is not an identity of a warehouse")
    if version != _VERSION:
        raise _bad(path, f"has version {version}; this daemon knows {_VERSION}: use a newer one")
    if len(body) != _BODY.size:
        raise _DamagedError(f"is damaged: it has {len(data)} bytes, not those of an identity")
    _, _, warehouse_id, secret = _BODY.unpack(body)
    return WarehouseIdentity(warehouse_id, secret)


def _refuse_others(directory: str, identity: WarehouseIdentity) -> None:
    """Files of ours say that the directory is; without any it may be new, or have lost all."""
    heads = [head for path in _stored(directory) if (head := _head(path)).strip(b"\0")]
    if heads and not any(identity.warehouse_id in head for head in heads):
        raise StorageError(
            f"{directory} has no good identity, and none of the {len(heads)} files in it that say "
            f"whose they are is of warehouse {identity.warehouse_id.hex()}, as the other directory "
            "is; name the two that belong together, or an empty directory in place of this one",
            code="foreign_directory",
            context={"path": directory},
        )


def _stored(directory: str) -> list[str]:
    """Files that have a warehouse's id in their first bytes."""
    paths = [os.path.join(directory, name) for name in ("control", "slots", "epoch")]
    return paths + segment_files(directory)


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def _mend(
    path: str, copy: WarehouseIdentity | _DamagedError | None, identity: WarehouseIdentity, log: Log
) -> None:
    """No reason to refuse the start when it fails: another copy is good, and the next start tries
    again."""
    if isinstance(copy, WarehouseIdentity):
        return
    problem = copy.problem if copy else "is missing"
    try:
        _write(path, identity)
    except OSError as error:
        text = f"it {problem}, and cannot be written: {error.strerror}"
        log.event(Event.IDENTITY_NOT_MENDED, path=path, text=text)
        return
    if copy:  # a missing second copy is that of an older daemon
        log.event(Event.IDENTITY_MENDED, path=path, text=f"it {problem}; another copy is good")


def _write_first(path: str, identity: WarehouseIdentity) -> None:
    """Without a copy the directory would be taken for a new one when it is named alone."""
    try:
        _write(path, identity)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}; make room, or name another directory",
            code="identity_unwritable",
            context={"path": path},
        ) from error


def _write(path: str, identity: WarehouseIdentity) -> None:
    body = _BODY.pack(_MAGIC, _VERSION, identity.warehouse_id, identity.secret)
    write_atomic(path, body + _checksum(body))


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()


def _differ(found: dict[str, WarehouseIdentity]) -> StorageError:
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


def _of_another_fleet(paths: list[str], theirs: FleetSecret, ours: FleetSecret) -> StorageError:
    folders = " and ".join(dict.fromkeys(os.path.dirname(path) for path in paths))
    stored, asked = theirs.fleet_id.hex(), ours.fleet_id.hex()
    return StorageError(
        f"what is stored in {folders} has keys of another secret (fleet {stored}) than that of "
        f"--fleet-secret (fleet {asked}), which would find none of it: start with the file that it "
        "was made with, or without --fleet-secret if there was none. To join this fleet, name new "
        f"directories, or empty {folders}: export before that, and import afterwards, what is to "
        "be kept",
        code="fleet_secret_differs",
        context={"stored": stored, "asked": asked},
    )


def _none_good(damaged: dict[str, _DamagedError]) -> StorageError:
    problems = "; ".join(f"{path} {damage.problem}" for path, damage in damaged.items())
    folders = " and ".join(dict.fromkeys(os.path.dirname(path) for path in damaged))
    return StorageError(
        f"no copy of the warehouse's identity is good: {problems}; copy a good one (of a backup, "
        "or of a directory of this warehouse that was not named) over any of them, or, to give up "
        f"what is stored here, empty {folders}",
        code="bad_identity",
        context={"path": next(iter(damaged))},
    )


def _bad(path: str, problem: str) -> StorageError:
    return StorageError(f"{path} {problem}", code="bad_identity", context={"path": path})
