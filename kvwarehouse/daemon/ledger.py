"""The ledger: the small durable state beside the pages. Namespaces and their numbers, the clear
epochs, tombstones of evicted keys, keeps, and how far the log may reach.

Thread-safe. Everything is in memory; every change is committed to disk before it is returned,
unless the disk refuses (full, read-only) or does not answer: then the ledger goes on in memory,
says so, and writes all of it at the next change or `heal` that the disk takes. Who changes it
waits for the disk, and for those who change it before; who reads it waits for neither.

What is younger than a clear: a page reserved under its namespace's clear epoch or a later one. Of a
namespace that is not in the ledger that is the floor, the epoch at the last loss of a ledger or
clear of everything: no later start forgets either.

A namespace that is forgotten leaves nothing but the floor, which rises above all that was ever
reserved for it: whatever file has a page of it still, and whoever knows its name still (a ledger
that was detached), it begins anew.

Invariants: epochs only rise; ordinals have no gaps, and one goes to another namespace only when one
was forgotten (pages and files go by ids); bounded (MAX_NAMESPACES, MAX_TOMBSTONES; beyond them the
oldest tombstones go, and a page they held down may come back, which is a page with right bytes).
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import lmdb

from kvwarehouse.daemon import epoch_file, ledger_file
from kvwarehouse.daemon.disk_calls import ANSWER_S, DiskCalls, LateDiskError
from kvwarehouse.daemon.ledger_file import DamagedLedgerError, LedgerFile
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.errors import CapacityError, InternalError, StorageError, UsageError
from kvwarehouse.types import MAX_NAMESPACE_BYTES, Namespace

MAX_NAMESPACES: Final = 4096  # native/base/types.h; a test compares them
MAX_TOMBSTONES: Final = 1 << 17
VERSION: Final = 1
LOST: Final = (1 << 64) - 1
"""A floor: only the core's files know of the last clear (native/warehouse/options.h)."""
LOG_AHEAD: Final = 1 << (20 + 32)
"""How far ahead of the log its end is noted: 2**20 segments."""
LOG_END_MAX: Final = 1 << 63
"""What is noted at most: half of all positions, 2,048 times LOG_AHEAD."""

_KEY_BYTES: Final = 16  # of the core's
_U16: Final = struct.Struct(">H")  # in keys: ordered
_U64: Final = struct.Struct("<Q")
_BALANCE: Final = struct.Struct("<dq")
_DAY_NS: Final = 86_400 * 10**9
_VERSION_KEY: Final = b"f/version"
_WAREHOUSE_KEY: Final = b"f/warehouse"
_SERIAL_KEY: Final = b"f/serial"
_EPOCH_KEY: Final = b"f/epoch"
_FLOOR_KEY: Final = b"f/floor"
_LOG_END_KEY: Final = b"f/log-end"
_WRITES_KEY: Final = b"f/writes"
_NAMESPACE: Final = b"n/"
_TOMBSTONE: Final = b"t/"
_KEEP: Final = b"k/"

# What reading records raises that were not written by us.
_SENSELESS: Final = (
    KeyError, ValueError, TypeError, OverflowError, RecursionError, struct.error, UsageError,
)  # fmt: skip


@dataclass(frozen=True)
class NamespaceRecord:
    ordinal: int
    space: Namespace
    clear_epoch: int  # pages reserved under an earlier epoch are gone
    created_at_ns: int  # wall clock


@dataclass(frozen=True)
class KeepRecord:
    """A prompt whose pages stay (keeps.py)."""

    number: int
    name: str
    namespace_id: bytes
    ttl_s: float
    renewed: bool
    until_ns: int
    """Wall clock."""
    lone: bool
    """Its pages stand alone."""
    marks: tuple[bytes, ...]
    """The core's keys of the pages that it is made from again."""


@dataclass(frozen=True)
class WriteBalance:
    """What was left of the NVMe tier's write budget."""

    left_bytes: float
    at_ns: int
    """Wall clock."""

    def left_at(self, now_ns: int, bytes_per_day: int) -> float:
        """With what has come in since. A clock that went back brings nothing."""
        earned = bytes_per_day * max(0, now_ns - self.at_ns) / _DAY_NS
        return min(self.left_bytes + earned, float(bytes_per_day))


@dataclass
class _State:
    serial: int  # how often this ledger was opened
    epoch: int
    floor: int
    log_end: int
    namespaces: dict[int, NamespaceRecord]
    tombstones: dict[bytes, int]
    keeps: dict[int, KeepRecord]
    writes: WriteBalance | None = None


@dataclass
class _Copy:
    path: str
    calls: DiskCalls
    file: LedgerFile | None = None  # none: memory has what is not on its disk

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self.file = None


class Ledger:
    """Opened once at the start, by the one daemon that owns the directory."""

    def __init__(
        self,
        directories: Sequence[str],
        warehouse_id: bytes,
        log: Log,
        *,
        expected: bool,
        lazy: bool = False,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Reads the ledger (in a child process), or makes one, in each of `directories`; the first
        is the one that lives longest. All that any of them knows holds. `expected`: there are pages
        already, so that a missing ledger is a lost one. A damaged ledger, or one of another
        warehouse, is set aside; `lost` is True when none is left. `lazy`: nothing is written before
        the first change, for a look at directories. `answer_s`: how long a disk is waited for, by
        every change too. Raises StorageError only for a ledger of a
        newer version, or beside an epoch file of one, which would be lost silently, or that cannot
        be probed."""
        self.calls = {path: DiskCalls(answer_s) for path in directories}
        self._copies = [
            _Copy(os.path.join(path, ledger_file.FILE_NAME), calls)
            for path, calls in self.calls.items()
        ]
        self._warehouse_id = warehouse_id
        self._log = log
        self._lock = threading.Lock()  # one change at a time, held while its disk is waited for
        self._memory = threading.Lock()  # within it, or alone to read: never held over a disk
        self.health = "ok"  # "ok", "rebuilt", "in_memory"
        self.reason = ""
        self.lost = False
        # Before a damaged ledger is set aside: a newer epoch file is refused as all was.
        known = [epoch_file.read(path, warehouse_id) for path in directories]
        self._state = self._read(expected)
        # The ledger may be lost, or be a step behind: the file of the epoch is written first.
        self._state.epoch = max(self._state.epoch, *known)
        if self.lost:
            self._state.floor = LOST
        self._by_id = {record.space.id: record for record in self._state.namespaces.values()}
        if not lazy:
            self._state.serial += 1
            self._commit({})
            if self._state.epoch:
                self._write_epoch()

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def floor(self) -> int:
        """The clear epoch of namespaces that are not in here. LOST until adopt_epoch()."""
        return self._state.floor

    @property
    def log_end(self) -> int:
        """No record of the NVMe tier lies above this log position: what is known of it where it is
        not there. 0: there never was one. A tombstone up to here holds for every record of its key
        that the tier may have, and for no later one: the core begins new segments above it."""
        return self._state.log_end

    def namespaces(self) -> list[NamespaceRecord]:
        with self._memory:
            return list(self._state.namespaces.values())

    def tombstones(self) -> list[tuple[bytes, int]]:
        with self._memory:
            return list(self._state.tombstones.items())

    def tombstone_count(self) -> int:
        return len(self._state.tombstones)

    def keeps(self) -> list[KeepRecord]:
        with self._memory:
            return list(self._state.keeps.values())

    def write_keeps(self, changed: Iterable[KeepRecord], ended: Iterable[int]) -> bool:
        """Returns whether that is durable."""
        with self._lock:
            made = {record.number: record for record in changed}
            gone = [number for number in ended if number in self._state.keeps]
            with self._memory:
                self._state.keeps.update(made)
                for number in gone:
                    del self._state.keeps[number]
            return self._commit(
                dict(map(_encode_keep, made.values())), [_keep_key(number) for number in gone]
            )

    def find(self, namespace_id: bytes) -> NamespaceRecord | None:
        with self._memory:
            return self._by_id.get(namespace_id)

    def propose(self, space: Namespace) -> NamespaceRecord:
        """A record for a new namespace, with the next number; `add` makes it known. The caller has
        seen that `space` is not known. Raises CapacityError at MAX_NAMESPACES, UsageError above
        MAX_NAMESPACE_BYTES: so all of them fit the file twice, as a clear of all needs."""
        size_bytes = len(json.dumps(space.to_fields()))
        if size_bytes > MAX_NAMESPACE_BYTES:
            raise UsageError(
                f"the fields of namespace {space.id.hex()} (model {space.model[:40]!r}) take "
                f"{size_bytes} bytes as JSON, and a warehouse takes {MAX_NAMESPACE_BYTES}; pass "
                "fingerprints in place of long texts, above all in extra",
                code="namespace_too_large",
                context={"size_bytes": size_bytes, "max_bytes": MAX_NAMESPACE_BYTES},
            )
        with self._memory:
            ordinal = len(self._state.namespaces)
            if ordinal >= MAX_NAMESPACES:
                raise CapacityError(
                    f"this warehouse has {MAX_NAMESPACES} namespaces, its bound, and all of them "
                    "are in use; clear what is not needed (kvwarehouse clear NAMESPACE), or start "
                    "another warehouse with its own --name and directories",
                    code="too_many_namespaces",
                    retryable=False,
                )
            # Not the epoch of now: the core may have taken in pages of it, younger than the floor.
            return NamespaceRecord(ordinal, space, self._state.floor, time.time_ns())

    def add(self, record: NamespaceRecord) -> None:
        """Makes a proposed namespace known."""
        with self._lock:
            if record.ordinal != len(self._state.namespaces) or record.space.id in self._by_id:
                raise InternalError(
                    f"namespace {record.ordinal} was proposed twice", code="namespace_order"
                )
            with self._memory:
                self._remember(record)
            self._commit(dict([_encode_namespace(record)]))

    def raise_epoch(self, namespace_ids: Iterable[bytes] | None) -> tuple[int, bool]:
        """A new clear epoch, and those of `namespace_ids` that are known cleared as of it; None:
        all, known or not. Returns it, and whether it is durable (when not, a restart brings back
        what it cleared)."""
        with self._lock:
            with self._memory:
                puts = self._raise_epoch(namespace_ids)
            noted = self._write_epoch()
            return self._state.epoch, self._commit(puts) and noted

    def forget(self, namespace_ids: Iterable[bytes]) -> tuple[int, bool]:
        """Those of `namespace_ids` that are known are no more, and the floor is a new epoch.
        Returns it, and whether that is durable (when not, a restart may know them again). The
        caller has seen that they have no page."""
        with self._lock:
            with self._memory:
                puts, deletes = self._forget(namespace_ids)
            noted = self._write_epoch()
            return self._state.epoch, self._commit(puts, deletes) and noted

    def adopt_epoch(self, seen: int) -> None:
        """The epoch is at least `seen`, the highest that stood in anything that outlived the
        ledger. If it was lost, that is the floor."""
        with self._lock:
            state = self._state
            epoch = max(state.epoch, seen)
            floor = epoch if state.floor == LOST else state.floor
            if (epoch, floor) != (state.epoch, state.floor):
                with self._memory:
                    state.epoch, state.floor = epoch, floor
                self._write_epoch()
                self._commit(self._epochs())

    def keep_ahead(self, log_end: int) -> None:
        """`log_end`: of now, from the core; 0 without a tier. Call before records are written, and
        again before another LOG_AHEAD / 2 is."""
        with self._lock:
            end = min(log_end + LOG_AHEAD, LOG_END_MAX)
            if log_end and end - self._state.log_end > LOG_AHEAD // 2:
                self._state.log_end = end
                self._commit({_LOG_END_KEY: _U64.pack(end)})

    def write_balance(self) -> WriteBalance | None:
        """As it was noted last; None: never."""
        return self._state.writes

    def note_writes(self, balance: WriteBalance) -> None:
        with self._lock:
            if balance != self._state.writes:
                self._state.writes = balance
                self._commit({_WRITES_KEY: _encode_balance(balance)})

    def bury(self, graves: Iterable[tuple[bytes, int]]) -> bool:
        """Tombstones: records of (key) up to (log position) are dead. Returns whether that is
        durable."""
        with self._lock:
            tombstones = self._state.tombstones
            fresh = {key: at for key, at in graves if at > tombstones.get(key, -1)}
            with self._memory:
                tombstones.update(fresh)
                excess = max(0, len(tombstones) - MAX_TOMBSTONES)
                dropped = heapq.nsmallest(excess, tombstones, key=tombstones.__getitem__)
                for key in dropped:
                    del tombstones[key]
            for key in dropped:
                fresh.pop(key, None)
            puts = {_TOMBSTONE + key: _U64.pack(at) for key, at in fresh.items()}
            return self._commit(puts, [_TOMBSTONE + key for key in dropped])

    def prune(self, oldest: int) -> int:
        """Forgets tombstones below the oldest position in the log. Returns how many."""
        with self._lock:
            tombstones = self._state.tombstones
            moot = [key for key, position in tombstones.items() if position < oldest]
            with self._memory:
                for key in moot:
                    del tombstones[key]
            if moot:
                self._commit({}, [_TOMBSTONE + key for key in moot])
            return len(moot)

    def heal(self) -> None:
        """Writes what a refusing disk has missed, if it takes it now. Call now and then."""
        with self._lock:
            if self.health == "in_memory":
                self._commit({})

    def close(self) -> None:
        with self._lock:
            for copy in self._copies:
                copy.close()

    # The rest is called with the lock held, or before anyone else has the object; with both, the
    # three that change the memory.

    def _raise_epoch(self, namespace_ids: Iterable[bytes] | None) -> dict[bytes, bytes]:
        """Returns what is to be written."""
        self._state.epoch += 1
        if namespace_ids is None:
            self._state.floor = self._state.epoch
        puts = self._epochs()
        for name in list(self._by_id) if namespace_ids is None else namespace_ids:
            if name in self._by_id:
                cleared = replace(self._by_id[name], clear_epoch=self._state.epoch)
                self._remember(cleared)
                puts.update([_encode_namespace(cleared)])
        return puts

    def _forget(self, namespace_ids: Iterable[bytes]) -> tuple[dict[bytes, bytes], list[bytes]]:
        """Returns what is to be written, and the keys that are to be deleted."""
        state = self._state
        state.epoch += 1
        state.floor = state.epoch
        puts, known = self._epochs(), len(state.namespaces)
        gone = {self._by_id.pop(name).ordinal for name in namespace_ids if name in self._by_id}
        kept = known - len(gone)
        # The last ones take their numbers: there are no gaps.
        last = [state.namespaces.pop(ordinal) for ordinal in range(kept, known)]
        moving = [record for record in last if record.ordinal not in gone]
        for ordinal, record in zip(sorted(gone), moving, strict=False):
            moved = replace(record, ordinal=ordinal)
            self._remember(moved)
            puts.update([_encode_namespace(moved)])
        return puts, [_key_of(ordinal) for ordinal in range(kept, known)]

    def _remember(self, record: NamespaceRecord) -> None:
        self._state.namespaces[record.ordinal] = record
        self._by_id[record.space.id] = record

    def _write_epoch(self) -> bool:
        first = self._copies[0]
        write = partial(epoch_file.write, os.path.dirname(first.path), self._warehouse_id)
        try:
            first.calls.wait_for(partial(write, self._state.epoch))
        except OSError:
            return False  # the ledger meets the same disk at once, and says what is wrong with it
        return True

    def _read(self, expected: bool) -> _State:
        found = [copy.path for copy in self._copies if os.path.exists(copy.path)]
        if expected and not found:
            self._damaged(self._copies[0].path, "it is missing beside stored pages")
        states = [state for path in found if (state := self._load(path))]
        self.lost = not states and self.health == "rebuilt"
        return _merged(states)

    def _load(self, path: str) -> _State | None:
        try:
            return self._decode(path, ledger_file.read(path))
        except DamagedLedgerError as damage:
            self._damaged(path, str(damage))
            return None

    def _damaged(self, path: str, reason: str) -> None:
        self.health, self.reason = "rebuilt", reason
        kept = ""
        with contextlib.suppress(OSError):
            kept = ledger_file.set_aside(path)
        self._log.event(Event.LEDGER_REBUILT, path=path, reason=reason, kept=kept)

    def _commit(self, puts: Mapping[bytes, bytes], deletes: Iterable[bytes] = ()) -> bool:
        """True when the first directory has it, which is the one that lives longest."""
        deletes = list(deletes)
        durable = [self._commit_to(copy, puts, deletes) for copy in self._copies]  # in each of them
        return durable[0]

    def _commit_to(
        self, copy: _Copy, puts: Mapping[bytes, bytes], deletes: Iterable[bytes]
    ) -> bool:
        try:
            if copy.file is None:
                # Everything: after a refusal nobody knows what the old file lacks.
                made = partial(LedgerFile, copy.path, self._everything())
                copy.file = copy.calls.wait_for(made)
            else:
                copy.calls.wait_for(partial(copy.file.commit, puts, deletes))
        except LateDiskError as error:
            copy.file = None  # the late call has it still, and closes it
            self._degrade(copy, error)
            return False
        except (OSError, lmdb.Error) as error:
            self._degrade(copy, error)
            return False
        if self.health == "in_memory" and all(each.file is not None for each in self._copies):
            self.health, self.reason = "ok", ""
        return True

    def _degrade(self, copy: _Copy, error: Exception) -> None:
        copy.close()
        reason = str(error)
        if self.health != "in_memory" or self.reason != reason:
            self._log.event(Event.LEDGER_DEGRADED, path=copy.path, reason=reason)
        self.health, self.reason = "in_memory", reason

    def _epochs(self) -> dict[bytes, bytes]:
        return {
            _EPOCH_KEY: _U64.pack(self._state.epoch),
            _FLOOR_KEY: _U64.pack(self._state.floor),
        }

    def _everything(self) -> dict[bytes, bytes]:
        return {
            _VERSION_KEY: _U64.pack(VERSION),
            _WAREHOUSE_KEY: self._warehouse_id,
            _SERIAL_KEY: _U64.pack(self._state.serial),
            **self._epochs(),
            _LOG_END_KEY: _U64.pack(self._state.log_end),
            **dict(_encode_namespace(record) for record in self._state.namespaces.values()),
            **{_TOMBSTONE + key: _U64.pack(at) for key, at in self._state.tombstones.items()},
            **dict(map(_encode_keep, self._state.keeps.values())),
            **({_WRITES_KEY: _encode_balance(self._state.writes)} if self._state.writes else {}),
        }

    def _decode(self, path: str, records: dict[bytes, bytes]) -> _State:
        try:
            version = _U64.unpack(records[_VERSION_KEY])[0]
            if version > VERSION:
                raise StorageError(
                    f"{path} has version {version}, and this daemon knows {VERSION}; start "
                    "the newer daemon that wrote it, or move the file away and lose its clears",
                    code="newer_ledger",
                )
            if records[_WAREHOUSE_KEY] != self._warehouse_id:
                raise DamagedLedgerError(f"it is of warehouse {records[_WAREHOUSE_KEY].hex()}")
            return _decode_state(records)
        except _SENSELESS as error:
            raise DamagedLedgerError(f"its records make no sense: {error!r}") from error


def _merged(states: list[_State]) -> _State:
    """What any of them knows: an older one was detached for a while. Ordinals are those of the one
    that was opened most often; what it does not know gets the next."""
    states = sorted(states, key=lambda state: state.serial, reverse=True)
    merged = states[0] if states else _State(0, 0, 0, 0, {}, {}, {})
    for state in states[1:]:
        _merge_namespaces(merged, state)
        merged.epoch = max(merged.epoch, state.epoch)
        merged.floor = max(merged.floor, state.floor)
        merged.log_end = max(merged.log_end, state.log_end)
        for key, at in state.tombstones.items():
            merged.tombstones[key] = max(at, merged.tombstones.get(key, 0))
    return merged


def _merge_namespaces(merged: _State, state: _State) -> None:
    mine = {record.space.id: record for record in merged.namespaces.values()}
    for record in state.namespaces.values():
        known = mine.get(record.space.id)
        ordinal = len(merged.namespaces) if known is None else known.ordinal
        # Where one does not know it, its floor holds; LOST says nothing.
        cleared = merged.floor % LOST if known is None else known.clear_epoch
        epoch = max(record.clear_epoch, cleared)
        if ordinal == MAX_NAMESPACES:
            merged.floor = max(merged.floor, epoch)
            continue
        merged.namespaces[ordinal] = replace(record, ordinal=ordinal, clear_epoch=epoch)
    theirs = {record.space.id for record in state.namespaces.values()}
    for record in mine.values():
        if record.space.id not in theirs:
            epoch = max(record.clear_epoch, state.floor % LOST)
            merged.namespaces[record.ordinal] = replace(record, clear_epoch=epoch)


def _encode_namespace(record: NamespaceRecord) -> tuple[bytes, bytes]:
    payload = {
        "fields": record.space.to_fields(),
        "clear_epoch": record.clear_epoch,
        "created_at_ns": record.created_at_ns,
    }
    return _key_of(record.ordinal), json.dumps(payload).encode("utf-8")


def _key_of(ordinal: int) -> bytes:
    return _NAMESPACE + _U16.pack(ordinal)


def _decode_namespace(key: bytes, payload: bytes) -> NamespaceRecord:
    values = json.loads(payload)
    return NamespaceRecord(
        _U16.unpack(key.removeprefix(_NAMESPACE))[0],
        Namespace.from_fields(values["fields"]),
        int(values["clear_epoch"]),
        int(values["created_at_ns"]),
    )


def _keep_key(number: int) -> bytes:
    return _KEEP + _U64.pack(number)


def _encode_keep(record: KeepRecord) -> tuple[bytes, bytes]:
    payload = {
        "name": record.name,
        "namespace": record.namespace_id.hex(),
        "ttl_s": record.ttl_s,
        "renewed": record.renewed,
        "until_ns": record.until_ns,
        "lone": record.lone,
        "marks": b"".join(record.marks).hex(),
    }
    return _keep_key(record.number), json.dumps(payload).encode("utf-8")


def _decode_keep(key: bytes, payload: bytes) -> KeepRecord:
    values = json.loads(payload)
    marks = bytes.fromhex(values["marks"])
    if len(marks) % _KEY_BYTES:
        raise ValueError("the marks of a keep are no keys")
    return KeepRecord(
        _U64.unpack(key.removeprefix(_KEEP))[0],
        str(values["name"]),
        bytes.fromhex(values["namespace"]),
        float(values["ttl_s"]),
        bool(values["renewed"]),
        int(values["until_ns"]),
        bool(values["lone"]),
        tuple(marks[at : at + _KEY_BYTES] for at in range(0, len(marks), _KEY_BYTES)),
    )


def _encode_balance(balance: WriteBalance) -> bytes:
    return _BALANCE.pack(balance.left_bytes, balance.at_ns)


def _decode_state(records: dict[bytes, bytes]) -> _State:
    serial, epoch = (_U64.unpack(records[key])[0] for key in (_SERIAL_KEY, _EPOCH_KEY))
    floor, log_end = (  # older daemons wrote none
        _U64.unpack(records.get(key, bytes(8)))[0] for key in (_FLOOR_KEY, _LOG_END_KEY)
    )
    state = _State(serial, epoch, floor, log_end, {}, {}, {})
    for key, payload in sorted(records.items()):
        if key.startswith(_NAMESPACE):
            record = _decode_namespace(key, payload)
            state.namespaces[record.ordinal] = record
        elif key.startswith(_TOMBSTONE):
            state.tombstones[key.removeprefix(_TOMBSTONE)] = _U64.unpack(payload)[0]
        elif key.startswith(_KEEP):
            keep = _decode_keep(key, payload)
            state.keeps[keep.number] = keep
        elif key == _WRITES_KEY:
            state.writes = WriteBalance(*_BALANCE.unpack(payload))
    if sorted(state.namespaces) != list(range(len(state.namespaces))):
        raise ValueError("the numbers of its namespaces have gaps")
    return state
