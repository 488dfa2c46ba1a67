"""Keeps: prompts whose pages stay until a time. The core holds the pages and ends what is over;
here are names, and what brings keeps over a restart.

Thread-safe. A keep is in the ledger some seconds after it was made, or its time was moved, so that
no call waits for a disk; a crash within them forgets it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvwarehouse.daemon.deadline import Deadline
from kvwarehouse.daemon.ledger import KeepRecord, Ledger
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.transfer import TransferSpan, span
from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.errors import CapacityError, UsageError
from kvwarehouse.wire import MAX_LIST_BYTES, prefix_from_wire
from kvwarehouse.wire import warehouse_pb2 as pb

if TYPE_CHECKING:
    from kvwarehouse.core import Core

MAX_KEEPS: Final = 4096
MAX_NAME_BYTES: Final = 256
MIN_TTL_S: Final = 1.0
MAX_TTL_S: Final = 366 * 86_400.0
PROMOTE_S: Final = 2.0
"""How long a keep waits for what is on NVMe alone, if its call has the time."""

# An end that moved by less is not written again: a restart ends a keep so much early at most.
_MOVED_S: Final = 5.0
_MOVED_SHARE: Final = 0.05

_REMOVE: Final = "remove one (kvwarehouse keep list, kvwarehouse keep remove NAME), or wait"
_BOUNDS: Final[Mapping[str, tuple[str, str]]] = {
    "bytes": (
        "it and what is kept take more than the {keep_capacity_bytes} bytes that keeps may hold"
        " (one of its own name counts until it is replaced)",
        f"{_REMOVE}, or start the daemon with a larger --keep-percent or --dram",
    ),
    "pages": (
        "{kept_pages} pages are kept, and no more than half of the index, or 1,048,576, may be",
        f"{_REMOVE}, or start the daemon with more --index-pages",
    ),
    "keeps": (f"there are {MAX_KEEPS:,} keeps", _REMOVE),
    "ends": (
        "all keeps have 65,536 prompts at most, and each one 4,096, of which a page that stands"
        " alone is one",
        _REMOVE,
    ),
    "gone": ("its pages were cleared meanwhile, or it took over a minute", "keep it again"),
}


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
        lost: Counter[str] = Counter()
        # Where there is no room for all any more, the newest are kept.
        for record in sorted(self._ledger.keeps(), key=lambda each: -each.number):
            self._last = max(self._last, record.number)
            # A clock that was set back makes no keep longer than it was.
            left_s = min((record.until_ns - time.time_ns()) / 1e9, record.ttl_s)
            renewed_s = record.ttl_s if record.renewed else 0.0
            why = "over"
            if left_s > 0:
                why = self._core.restore_keep(
                    record.number, list(record.marks), record.lone, left_s, renewed_s
                )
                lost[why] += 1
            if why:
                self._ended.add(record.number)
            else:
                self._records[record.number] = record
        del lost[""]
        if lost:
            self._log.event(Event.KEEPS_LOST, **lost)

    def keep(self, request: pb.KeepRequest, deadline: Deadline) -> pb.KeepResponse:
        """Waits for the core, and up to PROMOTE_S for pages to come from NVMe. Raises UsageError
        (code "bad_keep", "bad_prefix", "namespace_unknown"), CapacityError ("keeps_full")."""
        _check(request)
        record = self._warehouse.namespace(request.namespace_id)
        whole = span(record, prefix_from_wire(request.prefix), first=0, pages=None, shard=0)
        whole.check_kind()
        name = request.name or f"keep-{secrets.token_hex(4)}"
        with self._lock:
            if len(self._records) >= MAX_KEEPS and not self._named(name, record.space.id):
                raise self._full("keeps")
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
            min(PROMOTE_S, deadline.remaining_s() / 2),
        )
        if kept["refusal"]:
            raise self._full(kept["refusal"])
        made = KeepRecord(
            number,
            name if kept["pages"] else "",
            record.space.id,
            request.ttl_s,
            request.renewed,
            time.time_ns() + int(request.ttl_s * 1e9),
            request.lone,
            tuple(kept["marks"]),
        )
        if kept["pages"]:
            self._replace(made)
        return pb.KeepResponse(keep=_info(made, record.space.model, kept))

    def listed(self) -> pb.ListKeepsResponse:
        models = {record.space.id: record.space.model for record in self._warehouse.namespaces()}
        rows = {row["id"]: row for row in self._core.keeps()}
        with self._lock:
            records = [each for each in self._records.values() if each.number in rows]
        records.sort(key=lambda each: rows[each.number]["left_s"])
        status = self._core.status()
        listed = pb.ListKeepsResponse(
            bytes=status["kept_bytes"], capacity_bytes=status["keep_capacity_bytes"]
        )
        room = MAX_LIST_BYTES
        for each in records:
            info = _info(each, models.get(each.namespace_id, ""), rows[each.number])
            room -= info.ByteSize()
            if room < 0:
                break
            listed.keeps.append(info)
        return listed

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
            if not known and not self._ended:
                return None
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
            before = self._named(made.name, made.namespace_id)
            for number in before:
                self._forget(number)
            self._records[made.number] = made
            self._changed.add(made.number)
        for number in before:
            self._core.end_keep(number)

    def _named(self, name: str, namespace_id: bytes) -> list[int]:
        return [
            each.number
            for each in self._records.values()
            if (each.name, each.namespace_id) == (name, namespace_id)
        ]

    def _forget(self, number: int) -> None:
        del self._records[number]
        self._changed.discard(number)
        self._ended.add(number)

    def _full(self, bound: str) -> CapacityError:
        status = self._core.status()
        what, advice = _BOUNDS[bound]
        return CapacityError(
            f"this is not kept: {what.format(**status)}; {advice}",
            code="keeps_full",
            context={"bound": bound, "kept_bytes": status["kept_bytes"]},
        )


def _keys(whole: TransferSpan, *, lone: bool) -> Any:
    if whole.keys is None or not lone:
        return whole.keys
    count = len(whole.keys)
    pages, positions, parents = [1] * count, [0] * count, [None] * count
    return (list(whole.keys), pages, positions, parents)


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


def _info(record: KeepRecord, model: str, row: Mapping[str, Any]) -> pb.KeepInfo:
    """`row`: what the core says of it."""
    return pb.KeepInfo(
        name=record.name,
        namespace_id=record.namespace_id,
        model=model,
        pages=row["pages"],
        bytes=row["bytes"],
        ttl_s=record.ttl_s,
        left_s=row["left_s"],
        renewed=record.renewed,
    )
