"""What connectors found for the requests of their engines: the newest of them, in memory, with why
pages were missing when they were looked up. Thread-safe.

Incident of others: an engine's log has the id of a slow request, and nobody can say any more why
its prompt was computed, since by then its pages are stored.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any, Final, NamedTuple

from kvwarehouse.daemon.deadline import Deadline
from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.errors import UsageError
from kvwarehouse.types import KeyRun, RequestNote
from kvwarehouse.wire import (
    MAX_KEY_BYTES,
    MAX_LIST_BYTES,
    MAX_LIST_REQUESTS,
    MAX_NOTES,
    fill,
)
from kvwarehouse.wire import warehouse_pb2 as pb

MAX_REQUESTS: Final = 4096

# What is told later than that is told of now: a clock that was set must not make old of new.
_OLDEST_S: Final = 600


class _Kept(NamedTuple):
    number: int
    request: pb.NotedRequest


class RequestNotes:
    def __init__(self, warehouse: DaemonWarehouse) -> None:
        self._warehouse = warehouse
        self._lock = threading.Lock()
        self._engines: dict[str, OrderedDict[str, _Kept]] = {}
        self._count = 0
        self._noted = 0

    def note(self, request: pb.NoteRequestsRequest, deadline: Deadline) -> pb.NoteRequestsResponse:
        """A request that its engine notes again, as one that was preempted, is the newest, and its
        older note is forgotten. At the bound the engine with the most notes loses its oldest. What
        the deadline comes before is not kept.

        Raises UsageError beyond a bound (code "bad_note"), and for keys that are none ("bad_run"),
        before anything is kept."""
        if len(request.requests) > MAX_NOTES:
            raise _bad(f"{len(request.requests)} notes in a call", f"send at most {MAX_NOTES}")
        for note in request.requests:
            _check(note)
        now_ns = time.time_ns()
        for note in request.requests:
            if deadline.remaining_s() <= 0:
                break
            if not now_ns - _OLDEST_S * 10**9 <= note.at_ns <= now_ns:
                note.at_ns = now_ns
            missing = [why for part in note.missing if (why := self._why(part, note.at_ns))]
            kept = pb.NotedRequest(note=note, missing=missing)
            kept.note.ClearField("missing")
            with self._lock:
                self._keep(kept)
        return pb.NoteRequestsResponse()

    def list(self, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        """Those of that id, one of each engine; else those whose id begins so. As many as fit a
        message."""
        wanted = request.request_id
        with self._lock:
            noted = self._noted
            exact = [own[wanted] for own in self._engines.values() if wanted in own]
            found = exact or [
                kept
                for own in self._engines.values()
                for name, kept in own.items()
                if name.startswith(wanted)
            ]
        found.sort(reverse=True, key=lambda kept: kept.number)
        answer = pb.ListRequestsResponse(noted=noted)
        room = MAX_LIST_BYTES
        for _, kept in found[: min(request.limit or MAX_LIST_REQUESTS, MAX_LIST_REQUESTS)]:
            room -= kept.ByteSize()
            if room < 0:
                break
            answer.requests.append(kept)
        return answer

    def _keep(self, kept: pb.NotedRequest) -> None:
        own = self._engines.setdefault(kept.note.engine, OrderedDict())
        self._count += kept.note.request_id not in own
        own.pop(kept.note.request_id, None)
        own[kept.note.request_id] = _Kept(self._noted, kept)
        self._noted += 1
        if self._count > MAX_REQUESTS:
            name, most = max(self._engines.items(), key=lambda engine: len(engine[1]))
            most.popitem(last=False)
            self._count -= 1
            if not most:
                del self._engines[name]

    def _why(self, part: pb.MissingPages, at_ns: int) -> pb.MissingWhy | None:
        """None: nothing is asked, or the namespace is forgotten meanwhile."""
        if not part.keys.keys:
            return None
        try:
            record = self._warehouse.namespace(part.namespace_id)
            report: dict[str, Any] = self._warehouse.why_run(record, _run(part), at_ns)
        except UsageError as error:
            if error.code != "namespace_unknown":
                raise
            return None
        runs = [fill(pb.WhyRun(), each) for each in report["runs"]]
        for each in runs:
            each.first += part.position
        return pb.MissingWhy(
            namespace_id=part.namespace_id,
            model=record.space.model,
            page_tokens=record.space.page_tokens,
            runs=runs,
            branches=fill(pb.Branches(), report["branches"]),
        )


def _run(part: pb.MissingPages) -> KeyRun:
    return KeyRun(list(part.keys.keys), part.position, part.parent or None)


def _check(note: pb.RequestNote) -> None:
    longest = RequestNote.MAX_ID_BYTES
    for what, name in (("a request's", note.request_id), ("an engine's", note.engine or "-")):
        if not 0 < len(name.encode()) <= longest:
            raise _bad(f"{what} id of {len(name.encode())} bytes", f"use 1 to {longest}")
    keys = [key for part in note.missing for key in part.keys.keys]
    spaces = RequestNote.MAX_NAMESPACES
    if len(note.missing) > spaces or len(keys) > RequestNote.MAX_KEYS:
        raise _bad(
            f"{len(note.missing)} namespaces and {len(keys)} keys in the note of a request",
            f"send at most {spaces} and {RequestNote.MAX_KEYS}",
        )
    for part in note.missing:
        _run(part)
        if not all(0 < len(key) <= MAX_KEY_BYTES for key in (*part.keys.keys, part.parent or b"k")):
            raise _bad(
                "a key of no byte, or of too many, in the note of a request",
                f"use 1 to {MAX_KEY_BYTES} bytes",
            )


def _bad(what: str, fix: str) -> UsageError:
    return UsageError(f"{what}; {fix}", code="bad_note")
