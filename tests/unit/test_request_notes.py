"""What the daemon keeps of the requests of engines, and its bounds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest

from kvwarehouse.daemon.deadline import Deadline
from kvwarehouse.daemon.ledger import NamespaceRecord
from kvwarehouse.daemon.request_notes import MAX_REQUESTS, RequestNotes
from kvwarehouse.errors import UsageError
from kvwarehouse.types import KeyRun, Namespace, RequestNote
from kvwarehouse.wire import MAX_KEY_BYTES, MAX_LIST_REQUESTS, MAX_NOTES
from kvwarehouse.wire import warehouse_pb2 as pb

SPACE = Namespace(model="m", weights="w", dtype="b", layout="l/1", page_tokens=4, page_bytes=8)
BRANCHES = {"pages": 2, "more": False, "compared": 0, "common_tokens": 0, "tokens": []}


class Warehouse:
    """Stands in for the daemon's: every page was evicted."""

    def __init__(self) -> None:
        self.asked: list[tuple[KeyRun, int]] = []
        self.known = True

    def namespace(self, namespace_id: bytes) -> NamespaceRecord:
        if not self.known:
            raise UsageError("forgotten", code="namespace_unknown")
        return NamespaceRecord(0, SPACE, 0, 0)

    def why_run(self, record: NamespaceRecord, run: KeyRun, as_of_ns: int) -> dict[str, Any]:
        self.asked.append((run, as_of_ns))
        run_of = {"first": 0, "pages": len(run.keys), "state": "left", "reason": "evicted"}
        return {"found": 0, "runs": [run_of], "branches": BRANCHES}


@pytest.fixture
def warehouse() -> Any:
    return Warehouse()


@pytest.fixture
def notes(warehouse: Any) -> RequestNotes:
    return RequestNotes(warehouse)


def missing(position: int = 3, keys: int = 2, parent: bytes = b"p") -> pb.MissingPages:
    return pb.MissingPages(
        namespace_id=SPACE.id,
        position=position,
        parent=parent,
        keys=pb.EngineKeys(keys=[b"k"] * keys),
    )


def note(notes: RequestNotes, *names: str, **fields: Any) -> None:
    made = [pb.RequestNote(request_id=name, tokens=40, **fields) for name in names]
    notes.note(pb.NoteRequestsRequest(requests=made), Deadline(60))


def listed(notes: RequestNotes, name: str = "", limit: int = 0) -> list[str]:
    found = notes.list(pb.ListRequestsRequest(request_id=name, limit=limit)).requests
    return [each.note.request_id for each in found]


def test_why_is_asked_as_of_when_the_request_was_looked_up(
    notes: RequestNotes, warehouse: Any
) -> None:
    at_ns = time.time_ns() - 10**9
    note(notes, "r", at_ns=at_ns, missing=[missing()])
    assert warehouse.asked == [(KeyRun([b"k", b"k"], 3, b"p"), at_ns)]
    (kept,) = notes.list(pb.ListRequestsRequest(request_id="r")).requests
    assert (kept.note.tokens, len(kept.note.missing)) == (40, 0)
    (why,) = kept.missing
    assert (why.model, why.page_tokens, why.branches.pages) == ("m", 4, 2)
    assert [(run.first, run.pages, run.reason) for run in why.runs] == [(3, 2, "evicted")]


def test_first_page_of_a_prompt_has_no_page_before(notes: RequestNotes, warehouse: Any) -> None:
    note(notes, "r", missing=[missing(0, 1, b"")])
    assert warehouse.asked[0][0] == KeyRun([b"k"])


def test_namespace_that_is_forgotten_is_left_out(notes: RequestNotes, warehouse: Any) -> None:
    warehouse.known = False
    note(notes, "r", missing=[missing()])
    (kept,) = notes.list(pb.ListRequestsRequest()).requests
    assert not kept.missing


def test_request_is_found_by_its_id_or_its_begin_the_newest_first(notes: RequestNotes) -> None:
    note(notes, "chat-1", "chat-12", "other")
    assert listed(notes) == ["other", "chat-12", "chat-1"]
    assert listed(notes, "chat-1") == ["chat-1"]
    assert listed(notes, "chat") == ["chat-12", "chat-1"]
    assert listed(notes, "nobody") == []
    assert listed(notes, limit=2) == ["other", "chat-12"]
    note(notes, "chat-1", engine_tokens=4)
    assert listed(notes) == ["chat-1", "other", "chat-12"]
    answer = notes.list(pb.ListRequestsRequest(request_id="chat-1"))
    assert (answer.requests[0].note.engine_tokens, answer.noted) == (4, 4)


@pytest.mark.parametrize("ago_s", [None, 3600, -3600])
def test_note_without_a_time_that_can_be_is_of_now(
    notes: RequestNotes, warehouse: Any, ago_s: int | None
) -> None:
    before_ns = time.time_ns()
    at_ns = 0 if ago_s is None else before_ns - ago_s * 10**9
    note(notes, "r", at_ns=at_ns, missing=[missing()])
    (kept,) = notes.list(pb.ListRequestsRequest()).requests
    assert before_ns <= kept.note.at_ns <= time.time_ns()
    assert warehouse.asked[0][1] == kept.note.at_ns


def test_part_that_asks_nothing_is_left_out(notes: RequestNotes, warehouse: Any) -> None:
    note(notes, "r", missing=[missing(keys=0), missing(keys=1)])
    (kept,) = notes.list(pb.ListRequestsRequest()).requests
    assert len(kept.missing) == len(warehouse.asked) == 1


def test_engines_do_not_take_each_others_notes(notes: RequestNotes) -> None:
    for first in range(0, MAX_REQUESTS, MAX_NOTES):
        note(notes, *(str(first + at) for at in range(MAX_NOTES)), engine="a")
    note(notes, "1", engine="b")
    both = notes.list(pb.ListRequestsRequest(request_id="1")).requests
    assert [each.note.engine for each in both] == ["b", "a"]
    # The engine with the most lost its oldest.
    assert "0" not in listed(notes, "0")
    for number in range(2 * MAX_REQUESTS // MAX_NOTES):
        note(notes, *(f"a{number}.{at}" for at in range(MAX_NOTES)), engine="a")
    only = notes.list(pb.ListRequestsRequest(request_id="1")).requests
    assert [each.note.engine for each in only] == ["b"]


def test_answer_fits_a_message(notes: RequestNotes, monkeypatch: pytest.MonkeyPatch) -> None:
    note(notes, "old", "middle", "new")
    (one,) = notes.list(pb.ListRequestsRequest(limit=1)).requests
    room = 2 * one.ByteSize() + 10
    monkeypatch.setattr("kvwarehouse.daemon.request_notes.MAX_LIST_BYTES", room)
    assert listed(notes) == ["new", "middle"]


def test_call_that_comes_to_its_deadline_keeps_no_more(notes: RequestNotes) -> None:
    notes.note(pb.NoteRequestsRequest(requests=[pb.RequestNote(request_id="r")]), Deadline(0))
    assert listed(notes) == []


def names(count: int) -> Iterable[str]:
    return map(str, range(count))


def test_oldest_requests_are_forgotten_beyond_the_bound(notes: RequestNotes) -> None:
    for first in range(0, MAX_REQUESTS + MAX_NOTES, MAX_NOTES):
        note(notes, *(str(first + at) for at in range(MAX_NOTES)))
    answer = notes.list(pb.ListRequestsRequest(limit=5 * MAX_LIST_REQUESTS))
    assert (len(answer.requests), answer.noted) == (MAX_LIST_REQUESTS, MAX_REQUESTS + MAX_NOTES)
    assert listed(notes, "0") == []
    assert listed(notes, str(MAX_NOTES)) == [str(MAX_NOTES)]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"request_id": ""}, "bad_note"),
        ({"request_id": "r" * (RequestNote.MAX_ID_BYTES + 1)}, "bad_note"),
        ({"engine": "e" * (RequestNote.MAX_ID_BYTES + 1)}, "bad_note"),
        ({"missing": [missing(keys=1)] * (RequestNote.MAX_NAMESPACES + 1)}, "bad_note"),
        ({"missing": [missing(keys=RequestNote.MAX_KEYS // 2 + 1)] * 2}, "bad_note"),
        ({"missing": [missing(parent=b"p" * (MAX_KEY_BYTES + 1))]}, "bad_note"),
        (
            {"missing": [pb.MissingPages(namespace_id=SPACE.id, keys=pb.EngineKeys(keys=[b""]))]},
            "bad_note",
        ),
        ({"missing": [missing(0)]}, "bad_run"),
        ({"missing": [missing(1, parent=b"")]}, "bad_run"),
    ],
)
def test_note_beyond_a_bound_is_refused_and_nothing_is_kept(
    notes: RequestNotes, fields: dict[str, Any], code: str
) -> None:
    made = [pb.RequestNote(request_id="good"), pb.RequestNote(**{"request_id": "r", **fields})]
    with pytest.raises(UsageError) as caught:
        notes.note(pb.NoteRequestsRequest(requests=made), Deadline(60))
    assert caught.value.code == code
    assert listed(notes) == []


def test_too_many_notes_in_a_call_are_refused(notes: RequestNotes) -> None:
    with pytest.raises(UsageError, match=str(MAX_NOTES)):
        note(notes, *names(MAX_NOTES + 1))
