"""What connectors found for the requests of their engines: the newest of them, in memory, with why
pages were missing as of the time when the note came. Thread-safe.

Incident of others: an engine's log has the id of a slow request, and nobody can say any more why
its prompt was computed, since by then its pages are stored.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import islice
from typing import Any, Final

from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.errors import UsageError
from kvwarehouse.types import KeyRun
from kvwarehouse.wire import MAX_KEY_BYTES, fill
from kvwarehouse.wire import warehouse_pb2 as pb

MAX_REQUESTS: Final = 4096
MAX_NOTES: Final = 1024
"""In one call."""
MAX_ID_BYTES: Final = 256
MAX_MISSING: Final = 16
MAX_MISSING_KEYS: Final = 64
"""Of one request, in all its namespaces."""
MAX_LISTED: Final = 1000


class RequestNotes:
    def __init__(self, warehouse: DaemonWarehouse) -> None:
        self._warehouse = warehouse
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, pb.NotedRequest] = OrderedDict()
        self._noted = 0

    def note(self, request: pb.NoteRequestsRequest) -> pb.NoteRequestsResponse:
        """A request that is noted again, as one that was preempted, is the newest, and its older
        note is forgotten. Raises UsageError beyond a bound (code "bad_note"), and for keys that are
        none ("bad_run"), before anything is kept."""
        if len(request.requests) > MAX_NOTES:
            raise _bad(f"{len(request.requests)} notes in a call", f"send at most {MAX_NOTES}")
        for note in request.requests:
            _check(note)
        for note in request.requests:
            missing = [why for part in note.missing if (why := self._why(part, note.at_ns))]
            kept = pb.NotedRequest(note=note, missing=missing)
            kept.note.ClearField("missing")
            with self._lock:
                self._noted += 1
                self._kept.pop(note.request_id, None)
                self._kept[note.request_id] = kept
                if len(self._kept) > MAX_REQUESTS:
                    self._kept.popitem(last=False)
        return pb.NoteRequestsResponse()

    def list(self, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        """The one of that id, else those whose id begins so."""
        with self._lock:
            begins = request.request_id
            newest = reversed(self._kept.items())
            if begins in self._kept:
                found = [self._kept[begins]]
            else:
                limit = min(request.limit or MAX_LISTED, MAX_LISTED)
                found = list(
                    islice((kept for name, kept in newest if name.startswith(begins)), limit)
                )
            return pb.ListRequestsResponse(requests=found, noted=self._noted)

    def _why(self, part: pb.MissingPages, at_ns: int) -> pb.MissingWhy | None:
        """None: the namespace is forgotten meanwhile."""
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
    if not 0 < len(note.request_id.encode()) <= MAX_ID_BYTES:
        raise _bad(
            f"a request's id of {len(note.request_id.encode())} bytes", f"use 1 to {MAX_ID_BYTES}"
        )
    keys = [key for part in note.missing for key in part.keys.keys]
    if len(note.missing) > MAX_MISSING or len(keys) > MAX_MISSING_KEYS:
        raise _bad(
            f"{len(note.missing)} namespaces and {len(keys)} keys in the note of a request",
            f"send at most {MAX_MISSING} and {MAX_MISSING_KEYS}",
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
