"""What this host has applied of its fleet's clears, and which of its own the store does not have
yet: a file `remote_clears` beside the ledger (docs/format.md).

JSON with a checksum, 0600, written whole or not at all, in each directory that has a ledger. All
that any of them says holds: an older one was detached for a while, and to clear once more is no
harm. Stateless.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from kvwarehouse.atomic_file import write_atomic
from kvwarehouse.daemon import ledger_file
from kvwarehouse.daemon.disk_calls import DiskCalls
from kvwarehouse.errors import StorageError
from kvwarehouse.remote.names import EVERYTHING, ID_BYTES

FILE_NAME: Final = "remote_clears"
SIZE_MAX: Final = 16 << 20

_VERSION: Final = 1
_U64_MAX: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Applied:
    """What this host has of a namespace under `clear_epoch`, its own, or a later one is of the
    fleet's `epoch`."""

    epoch: int
    clear_epoch: int


@dataclass
class ClearsState:
    """By namespace, EVERYTHING among them. `owed`: clears of this host, by their clear epochs."""

    applied: dict[bytes, Applied] = field(default_factory=dict)
    owed: dict[bytes, int] = field(default_factory=dict)
    floor: int = 0
    """The ledger's, when this was so. A namespace that is not in `applied` was cleared without the
    tier where its clear epoch is above."""

    def owes(self, name: bytes) -> bool:
        """A marker that is yet to be written covers whatever was cleared until then."""
        return name in self.owed or EVERYTHING in self.owed

    def merge(self, other: ClearsState) -> None:
        self.floor = max(self.floor, other.floor)
        for name, applied in other.applied.items():
            mine = self.applied.get(name)
            if mine is None or _age(mine) < _age(applied):
                self.applied[name] = applied
        for name, clear_epoch in other.owed.items():
            self.owed[name] = max(clear_epoch, self.owed.get(name, 0))


@dataclass(frozen=True)
class Damaged:
    path: str
    reason: str
    kept: str
    """What it is called now; "": it could not be renamed."""


def read(
    directories: Sequence[str], warehouse_id: bytes
) -> tuple[ClearsState | None, Sequence[Damaged]]:
    """What the files say, and those that say nothing and were set aside. None: there is none that
    does. Raises StorageError for one of a newer version: writing over it would lose its clears."""
    found: ClearsState | None = None
    damaged: list[Damaged] = []
    for directory in directories:
        path = os.path.join(directory, FILE_NAME)
        try:
            with open(path, "rb") as file:
                state = _decode(path, file.read(SIZE_MAX + 1), warehouse_id)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            damaged.append(Damaged(path, repr(error), _set_aside(path)))
            continue
        found = found or ClearsState()
        found.merge(state)
    return found, damaged


def write(directories: Mapping[str, DiskCalls], warehouse_id: bytes, state: ClearsState) -> str:
    """Durable on return in the first directory, which is the one that lives longest. Returns why it
    is not, "": it is. Waits for each disk as long as its calls do."""
    data = _encode(warehouse_id, state)
    reasons = []
    for directory, calls in directories.items():
        try:
            calls.wait_for(partial(write_atomic, os.path.join(directory, FILE_NAME), data))
            reasons.append("")
        except OSError as error:
            reasons.append(str(error))
    return reasons[0]


def _age(applied: Applied) -> tuple[int, int]:
    return applied.clear_epoch, applied.epoch


def _encode(warehouse_id: bytes, state: ClearsState) -> bytes:
    values = {
        "version": _VERSION,
        "warehouse": warehouse_id.hex(),
        "applied": {
            name.hex(): [applied.epoch, applied.clear_epoch]
            for name, applied in state.applied.items()
        },
        "owed": {name.hex(): clear_epoch for name, clear_epoch in state.owed.items()},
        "floor": state.floor,
    }
    return json.dumps({**values, "check": _checksum(values)}).encode()


def _decode(path: str, data: bytes, warehouse_id: bytes) -> ClearsState:
    """Raises what reading raises of a file that we have not written."""
    if len(data) > SIZE_MAX:
        raise ValueError(f"it has more than {SIZE_MAX} bytes")
    values = json.loads(data)
    if values.pop("check") != _checksum(values):
        raise ValueError("its checksum does not hold")
    if values["version"] > _VERSION:
        raise StorageError(
            f"{path} has version {values['version']}, and this daemon knows {_VERSION}; start the "
            "newer daemon that wrote it, or move the file away and clear what others have cleared",
            code="newer_remote_clears",
            context={"path": path},
        )
    if values["warehouse"] != warehouse_id.hex():
        raise ValueError(f"it is of warehouse {values['warehouse']}")
    applied = {
        _id(name): Applied(_number(epoch), _number(clear_epoch))
        for name, (epoch, clear_epoch) in values["applied"].items()
    }
    owed = {_id(name): _number(clear_epoch) for name, clear_epoch in values["owed"].items()}
    return ClearsState(applied, owed, _number(values["floor"]))


def _id(text: str) -> bytes:
    name = bytes.fromhex(text)
    if len(name) != ID_BYTES:
        raise ValueError(f"{text!r} is no namespace's id")
    return name


def _number(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value <= _U64_MAX:
        raise ValueError(f"{value!r} is no epoch")
    return value


def _checksum(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _set_aside(path: str) -> str:
    with contextlib.suppress(OSError):
        return ledger_file.set_aside(path)
    return ""
