"""Keeps: prompts whose pages stay until a time. The core holds the pages and ends what is over;
here are names, and what brings keeps over a restart.

Thread-safe. A keep is in the ledger some seconds after it was made, or its time was moved, so that
no call waits for a disk; a crash within them forgets it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvwarehouse.daemon.ledger import KeepRecord, Ledger
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.transfer import TransferSpan, span
from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.errors import CapacityError, UsageError
from kvwarehouse.wire import prefix_from_wire
from kvwarehouse.wire import warehouse_pb2 as pb

if TYPE_CHECKING:
    from kvwarehouse.core import Core

MAX_NAME_BYTES: Final = 256
MIN_TTL_S: Final = 1.0
MAX_TTL_S: Final = 366 * 86_400.0

# An end that moved by less is not written again: a restart ends a keep so much early at most.
_MOVED_S: Final = 5.0
_MOVED_SHARE: Final = 0.05


class Keeps:
    def __init__(self, core: Core, ledger: Ledger, warehouse: DaemonWarehouse, log: Log) -> None:
        self._core = core
        self._warehouse = warehouse
        self._ledger = ledger
        self._log = log
        self._lock = threading.Lock()
        self._records: dict[int, KeepRecord] = {}
        self._changed: set[int] = set()
        self._ended: set[int] = set()
        self._last = 0

    def restore(self) -> None:
        """What the last daemon kept, as far as it is there. Once the core has recovered, and before
        it starts."""
        lost = 0
        for record in self._ledger.keeps():
            self._last = max(self._last, record.number)
            # A clock that was set back makes no keep longer than it was.
            left_s = min((record.until_ns - time.time_ns()) / 1e9, record.ttl_s)
            renewed_s = record.ttl_s if record.renewed else 0.0
            if left_s > 0 and self._core.restore_keep(
                record.number, list(record.ends), left_s, renewed_s
            ):
                self._records[record.number] = record
            else:
                self._ended.add(record.number)
                lost += left_s > 0
        if lost:
            self._log.event(Event.KEEPS_LOST, keeps=lost)

    def keep(self, request: pb.KeepRequest) -> pb.KeepResponse:
        """Waits for the core, and up to two seconds for pages to come from NVMe. Raises UsageError
        (code "bad_keep", "bad_prefix", "bad_run", "namespace_unknown"), CapacityError
        ("keeps_full")."""
        _check(request)
        record = self._warehouse.namespace(request.namespace_id)
        whole = span(record, prefix_from_wire(request.prefix), first=0, pages=None, shard=0)
        whole.check_kind()
        with self._lock:
            self._last += 1
            number = self._last
        kept = self._core.keep(
            number,
            record.space.id,
            record.space.page_tokens,
            whole.tokens,
            _keys(whole, lone=request.lone),
            request.ttl_s,
            request.renewed,
        )
        if not kept["has_room"]:
            raise self._full()
        made = KeepRecord(
            number,
            request.name or f"keep-{secrets.token_hex(4)}",
            record.space.id,
            kept["pages"],
            kept["bytes"],
            request.ttl_s,
            request.renewed,
            time.time_ns() + int(request.ttl_s * 1e9),
            tuple(kept["ends"]),
        )
        if made.pages:
            self._replace(made)
        left_s = request.ttl_s if made.pages else 0.0
        return pb.KeepResponse(keep=_info(made, record.space.model, left_s))

    def list(self) -> pb.ListKeepsResponse:
        models = {record.space.id: record.space.model for record in self._warehouse.namespaces()}
        left_s = {row["id"]: row["left_s"] for row in self._core.keeps()}
        with self._lock:
            records = [each for each in self._records.values() if each.number in left_s]
        records.sort(key=lambda each: left_s[each.number])
        status = self._core.status()
        return pb.ListKeepsResponse(
            keeps=[
                _info(each, models.get(each.namespace_id, ""), left_s[each.number])
                for each in records
            ],
            bytes=status["kept_bytes"],
            capacity_bytes=status["keep_capacity_bytes"],
        )

    def remove(self, request: pb.RemoveKeepsRequest) -> pb.RemoveKeepsResponse:
        """Raises UsageError (code "no_target") for a request that names none."""
        if not request.all and not request.name:
            raise UsageError("the request names no keep; set name, or all", code="no_target")
        with self._lock:
            gone = [
                each.number
                for each in self._records.values()
                if (request.all or each.name == request.name)
                and request.namespace_id in (b"", each.namespace_id)
            ]
            for number in gone:
                self._forget(number)
        for number in gone:
            self._core.end_keep(number)
        return pb.RemoveKeepsResponse(keeps=len(gone))

    def tend(self) -> Callable[[], object] | None:
        """Asks the core which keeps there are, and until when, and returns what writes that to the
        ledger, which waits for its disk. None: the ledger has it. Call now and then."""
        with self._lock:
            known = set(self._records)
        left_s = {row["id"]: row["left_s"] for row in self._core.keeps()}
        now_ns = time.time_ns()
        with self._lock:
            for number in known & set(self._records):
                if number not in left_s:
                    self._forget(number)
                    continue
                record = self._records[number]
                until_ns = now_ns + int(left_s[number] * 1e9)
                moved_s = abs(until_ns - record.until_ns) / 1e9
                if moved_s > max(_MOVED_S, _MOVED_SHARE * record.ttl_s):
                    self._records[number] = replace(record, until_ns=until_ns)
                    self._changed.add(number)
            changed = [self._records[number] for number in self._changed]
            ended, self._changed, self._ended = self._ended, set(), set()
        return partial(self._ledger.write_keeps, changed, ended) if changed or ended else None

    def _replace(self, made: KeepRecord) -> None:
        with self._lock:
            before = [
                each.number
                for each in self._records.values()
                if (each.name, each.namespace_id) == (made.name, made.namespace_id)
            ]
            for number in before:
                self._forget(number)
            self._records[made.number] = made
            self._changed.add(made.number)
        for number in before:
            self._core.end_keep(number)

    def _forget(self, number: int) -> None:
        del self._records[number]
        self._changed.discard(number)
        self._ended.add(number)

    def _full(self) -> CapacityError:
        status = self._core.status()
        return CapacityError(
            f"{status['keeps']} keeps hold {status['kept_bytes']} bytes of"
            f" {status['keep_capacity_bytes']}, and there is no room for this one too; remove one"
            " (kvwarehouse keep list, kvwarehouse keep remove NAME), wait until one ends, or start"
            " the daemon with a larger --keep-percent or --dram",
            code="keeps_full",
            context={
                "kept_bytes": status["kept_bytes"],
                "capacity_bytes": status["keep_capacity_bytes"],
            },
        )


def _keys(whole: TransferSpan, *, lone: bool) -> Any:
    if whole.keys is None or not lone:
        return whole.keys
    pages = len(whole.keys)
    return (list(whole.keys), [1] * pages, [0] * pages, [None] * pages)


def _check(request: pb.KeepRequest) -> None:
    name_bytes = len(request.name.encode())
    if name_bytes > MAX_NAME_BYTES or not request.name.isprintable():
        raise UsageError(
            f"the name of a keep has {name_bytes} bytes, or some that are not printed; use at most"
            f" {MAX_NAME_BYTES}, printable",
            code="bad_keep",
        )
    if not MIN_TTL_S <= request.ttl_s <= MAX_TTL_S:
        raise UsageError(
            f"ttl_s {request.ttl_s:g} is out of range; use {MIN_TTL_S:g} to {MAX_TTL_S:,.0f}",
            code="bad_keep",
        )
    if request.lone and request.prefix.WhichOneof("by") != "keys":
        raise UsageError("pages that stand alone are named by keys", code="bad_keep")


def _info(record: KeepRecord, model: str, left_s: float) -> pb.KeepInfo:
    return pb.KeepInfo(
        name=record.name if record.pages else "",
        namespace_id=record.namespace_id,
        model=model,
        pages=record.pages,
        bytes=record.size_bytes,
        ttl_s=record.ttl_s,
        left_s=left_s,
        renewed=record.renewed,
    )
