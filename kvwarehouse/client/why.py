"""Why the pages of a prompt are found or not: the question, and its answer as plain values.
Stateless."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvwarehouse.client.admin import Named, Opened, StoredNamespace, namespace_id, stored_namespace
from kvwarehouse.client.routing import Question
from kvwarehouse.client.rpc import Call
from kvwarehouse.errors import UsageError
from kvwarehouse.types import RequestNote
from kvwarehouse.wire import MAX_LIST_REQUESTS, plain
from kvwarehouse.wire import warehouse_pb2 as pb


@dataclass(frozen=True)
class WhyRun:
    """Consecutive pages of a prompt of which the same is to be said. Times are wall clock, of a
    second or two; 0: none, or not known."""

    first: int
    pages: int
    state: str
    """"hbm", "dram", "nvme": there, and this is the fastest tier with them. "storing": somebody
    writes them now. "left": they were there, and left. "refused": they were not stored when they
    came. "unknown": never stored, or they left or were refused before `remembered_ns` (0: before
    this daemon began)."""
    reason: str = ""
    """Of "left" and "refused", as the metrics name it (docs/operations.md)."""
    earliest_at_ns: int = 0
    """When the first of them left or was refused, and when the last."""
    latest_at_ns: int = 0
    stored_at_ns: int = 0
    """Of the first page, when it was stored."""
    used_at_ns: int = 0
    """Of the first page, its last use; 0: none since it came, or since the daemon began."""
    used_earlier: bool = False
    """used_at_ns is the latest that it can have been: it may be hours earlier."""
    remembered_ns: int = 0
    first_at_ns: int = 0
    """When the first page left or was refused."""

    @property
    def there(self) -> bool:
        return self.state in ("hbm", "dram", "nvme")


@dataclass(frozen=True)
class Branches:
    """What is stored where the prompt's page is not: pages behind the same beginning, with other
    tokens."""

    pages: int = 0
    more: bool = False
    """There are others, which were not looked at."""
    compared: int = 0
    """Of `pages`, those whose tokens are at hand: in DRAM, and stored by tokens."""
    common_tokens: int = 0
    """With which the one most alike begins as the prompt's page does."""
    tokens: tuple[int, ...] = ()
    """All of that one's, if they were asked for."""


@dataclass(frozen=True)
class PromptWhy:
    """What one namespace has of a prompt."""

    namespace: StoredNamespace
    pages: int
    """Of the prompt: whole ones."""
    found: int
    """Of them, those of the longest prefix that this daemon's tiers have."""
    remote_pages: int
    """Behind these, those that the remote store probably has."""
    runs: tuple[WhyRun, ...]
    """All pages, in order; of a prompt with over 1,000 runs the first 1,000."""
    branches: Branches

    @property
    def page_tokens(self) -> int:
        return int(self.namespace.fields["page_tokens"])


@dataclass(frozen=True)
class WhyAnswer:
    namespaces: tuple[PromptWhy, ...]
    """Those with the longest stored prefix first, 8 at most."""
    others: int
    """How many more were asked for."""


@dataclass(frozen=True)
class MissingWhy:
    """Why pages were missing when a note of them came."""

    namespace_id: bytes
    model: str
    page_tokens: int
    runs: tuple[WhyRun, ...]
    """`first` is a page's position in the prompt."""
    branches: Branches
    """At the first of them, but for the prompt's first page."""


@dataclass(frozen=True)
class NotedRequest:
    note: RequestNote
    """Without `missing`."""
    missing: tuple[MissingWhy, ...]


def note_requests(notes: Sequence[RequestNote]) -> Call[pb.NoteRequestsResponse, None]:
    return Call(
        "NoteRequests", pb.NoteRequestsRequest(requests=map(_to_wire, notes)), lambda answer: None
    )


def requests(request_id: str, limit: int) -> Call[pb.ListRequestsResponse, list[NotedRequest]]:
    """Raises UsageError for a limit that is none."""
    if not 1 <= limit <= MAX_LIST_REQUESTS:
        raise UsageError(
            f"limit {limit} cannot be; use 1 to {MAX_LIST_REQUESTS:,}", code="bad_limit"
        )
    request = pb.ListRequestsRequest(request_id=request_id, limit=limit)
    return Call("ListRequests", request, lambda answer: [_noted(each) for each in answer.requests])


def _to_wire(note: RequestNote) -> pb.RequestNote:
    return pb.RequestNote(
        request_id=note.request_id,
        at_ns=note.at_ns,
        tokens=note.tokens,
        engine_tokens=note.engine_tokens,
        found_tokens=note.found_tokens,
        load_tokens=note.load_tokens,
        engine=note.engine,
        missing=[
            pb.MissingPages(
                namespace_id=each.namespace_id,
                position=each.run.position,
                parent=each.run.parent or b"",
                keys=pb.EngineKeys(keys=each.run.keys),
            )
            for each in note.missing
        ],
    )


def _noted(each: pb.NotedRequest) -> NotedRequest:
    note = {name: value for name, value in plain(each.note).items() if name != "missing"}
    return NotedRequest(
        RequestNote(**note),
        tuple(
            MissingWhy(
                why.namespace_id,
                why.model,
                why.page_tokens,
                _runs(why.runs),
                _branches(why.branches),
            )
            for why in each.missing
        ),
    )


def why(
    tokens: Any,
    keys: Sequence[bytes] | None,
    space: Named | Opened | None,
    model: str,
    *,
    with_tokens: bool,
) -> Call[pb.WhyResponse, WhyAnswer]:
    """Raises UsageError for a prompt that is none, and for both a namespace and a model."""
    if space is not None and model:
        raise UsageError("pass either a namespace or a model, not both", code="bad_namespace")
    asked = Question(tokens, keys, model, b"" if space is None else namespace_id(space)).to_wire()
    request = pb.WhyRequest(prefix=asked.prefix, with_tokens=with_tokens)
    if space is not None:
        request.namespace_id = asked.namespace_id
    elif model:
        request.model = model
    return Call("Why", request, _decoded)


def _decoded(answer: pb.WhyResponse) -> WhyAnswer:
    return WhyAnswer(tuple(_prompt(each) for each in answer.namespaces), answer.others)


def _prompt(each: pb.PromptWhy) -> PromptWhy:
    return PromptWhy(
        stored_namespace(each.namespace),
        each.pages,
        each.found,
        each.remote_pages,
        _runs(each.runs),
        _branches(each.branches),
    )


def _runs(runs: Iterable[pb.WhyRun]) -> tuple[WhyRun, ...]:
    return tuple(WhyRun(**plain(run)) for run in runs)


def _branches(branches: pb.Branches) -> Branches:
    fields = plain(branches)
    return Branches(**{**fields, "tokens": tuple(fields["tokens"])})
