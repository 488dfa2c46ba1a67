"""The administrative calls of the service, and their answers as plain values. Stateless.

Where a call takes a namespace it is a Namespace, one that a client has opened, one of a listing, or
its id; None for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypedDict

from kvwarehouse.client.endpoint import checked_timeout, server_wait_s
from kvwarehouse.client.rpc import Call
from kvwarehouse.errors import UsageError
from kvwarehouse.miss_ratio import MissRatio
from kvwarehouse.types import (
    NAMESPACE_ID_BYTES,
    BadCopy,
    CheckProgress,
    ClearedPages,
    FlushResult,
    Namespace,
    TierCheck,
)
from kvwarehouse.wire import (
    MAX_LIST_PAGES,
    fields_from_wire,
    namespace_pb2,
    namespace_to_wire,
    plain,
)
from kvwarehouse.wire import warehouse_pb2 as pb

_CHECK_TIMEOUT_S = 86_400.0  # as long as a daemon lets one go on
# The service takes 0 for "as long as the call may last".
_LEAST_WAIT_S = 0.001


@dataclass(frozen=True)
class StoredNamespace:
    """A namespace that a warehouse keeps. Calls that take a namespace take it, but `open`."""

    id: bytes
    fields: Mapping[str, Any] = field(hash=False)
    """As Namespace.to_fields, but of a salt a digest: "sha256:" and 8 hex digits."""
    ordinal: int
    clear_epoch: int
    created_at_ns: int

    @property
    def space(self) -> Namespace:
        """To open it. Raises UsageError (code "salted") where its salt is not in the listing."""
        space = Namespace.from_fields(self.fields)
        if space.id != self.id:
            raise UsageError(
                f"namespace {self.id.hex()} cannot be opened by what a listing tells of it, which"
                " is no salt: make the Namespace with the salt, or name this one by its id",
                code="salted",
            )
        return space


Named: TypeAlias = Namespace | StoredNamespace | bytes
"""A namespace, as administration is told which one it is; bytes: its id."""


class Opened(Protocol):
    """A namespace that a client has opened."""

    @property
    def space(self) -> Namespace: ...


@dataclass(frozen=True)
class StoredPage:
    """A page in any tier."""

    id: int
    key: bytes
    parent: bytes
    position: int
    tiers: tuple[str, ...]
    size_bytes: int
    sealed_at_ns: int


def open_namespace(
    space: Namespace, address: object, timeout_s: float | None = None
) -> Call[pb.OpenNamespaceResponse, None]:
    """Registers `space`, or finds it. Raises UsageError where its pages fit no slab, or it has
    too many bytes."""

    def check(answer: pb.OpenNamespaceResponse) -> None:
        if answer.namespace.id != space.id:
            raise UsageError(
                f"{address} computes another id for the namespace; client and daemon are of"
                " versions that do not fit, upgrade the older",
                code="bad_namespace",
            )

    request = pb.OpenNamespaceRequest(namespace=namespace_to_wire(space), id=space.id)
    return Call("OpenNamespace", request, check, timeout_s)


def status() -> Call[pb.StatusResponse, dict[str, Any]]:
    return Call("Status", pb.StatusRequest(), lambda answer: plain(answer.status))


def namespaces(after: int) -> Call[pb.ListNamespacesResponse, tuple[list[StoredNamespace], int]]:
    """As many as fit a message, and where to go on: at no later place when these were the last."""
    return Call("ListNamespaces", pb.ListNamespacesRequest(after=after), _namespaces)


def pages(
    space: Named | Opened, after: int
) -> Call[pb.ListPagesResponse, tuple[list[StoredPage], int]]:
    """The next pages behind index position `after`, at most 1,000, and where to go on: at no later
    position when these were the last. What changes meanwhile may or may not be among them."""
    request = pb.ListPagesRequest(
        namespace_id=namespace_id(space), after=after, limit=MAX_LIST_PAGES
    )
    return Call("ListPages", request, _pages)


def clear(
    space: Named | Opened | None, *, everything: bool, forget: bool
) -> Call[pb.ClearResponse, ClearedPages]:
    """Raises UsageError where not exactly one of the first two is given: it cannot be undone."""
    if (space is None) is not bool(everything):
        raise UsageError(
            "clear takes a namespace, or all=True for every one of them; no restart brings back"
            " what it removes",
            code="no_target",
        )
    return Call("Clear", pb.ClearRequest(forget=forget, **_target(space)), _cleared)


def evict(space: Named | Opened | None, pages: int, tiers: str) -> Call[pb.EvictResponse, int]:
    return Call("Evict", pb.EvictRequest(pages=pages, tiers=tiers, **_target(space)), _count)


def flush(timeout_s: float) -> Call[pb.FlushResponse, FlushResult]:
    timeout_s = checked_timeout(timeout_s)
    request = pb.FlushRequest(timeout_s=max(_LEAST_WAIT_S, server_wait_s(timeout_s)))
    return Call("Flush", request, _flushed, timeout_s or None)


def drain(timeout_s: float) -> Call[pb.DrainResponse, FlushResult]:
    timeout_s = checked_timeout(timeout_s)
    request = pb.DrainRequest(timeout_s=max(_LEAST_WAIT_S, server_wait_s(timeout_s)))
    return Call("Drain", request, lambda answer: _flushed(answer.flush), timeout_s or None)


def undrain() -> Call[pb.UndrainResponse, bool]:
    return Call("Undrain", pb.UndrainRequest(), lambda answer: bool(answer.drained))


def sweep() -> Call[pb.SweepResponse, int]:
    return Call("Sweep", pb.SweepRequest(), _count)


def miss_ratio(space: Named | Opened | None) -> Call[pb.MissRatioResponse, MissRatio]:
    return Call("MissRatio", pb.MissRatioRequest(**_target(space)), _miss_ratio)


def check(space: Named | Opened | None, *, repair: bool) -> Call[pb.CheckResponse, CheckProgress]:
    """Its answers are streamed."""
    request = pb.CheckRequest(repair=repair, **_target(space))
    return Call("Check", request, _progress, _CHECK_TIMEOUT_S)


def stored_namespace(info: namespace_pb2.NamespaceInfo) -> StoredNamespace:
    return StoredNamespace(
        info.id,
        fields_from_wire(info.fields),
        info.ordinal,
        info.clear_epoch,
        info.created_at_ns,
    )


def _namespaces(answer: pb.ListNamespacesResponse) -> tuple[list[StoredNamespace], int]:
    return [stored_namespace(info) for info in answer.namespaces], answer.next


def _pages(answer: pb.ListPagesResponse) -> tuple[list[StoredPage], int]:
    listed = [
        StoredPage(
            page.id,
            page.key,
            page.parent,
            page.position,
            tuple(page.tiers),
            page.bytes,
            page.sealed_at_ns,
        )
        for page in answer.pages
    ]
    return listed, answer.next


def _miss_ratio(answer: pb.MissRatioResponse) -> MissRatio:
    return MissRatio(
        answer.uses,
        answer.uses_lost,
        answer.since_s,
        answer.share,
        tuple(answer.sizes_bytes),
        tuple(answer.hits),
    )


def _progress(answer: pb.CheckResponse) -> CheckProgress:
    return CheckProgress(
        tuple(_tier_check(tier) for tier in answer.tiers),
        tuple(BadCopy(page.key, page.tier, page.reason) for page in answer.bad),
        answer.done,
    )


def _cleared(answer: pb.ClearResponse) -> ClearedPages:
    return ClearedPages(answer.pages, answer.remote)


def _count(answer: pb.EvictResponse | pb.SweepResponse) -> int:
    return answer.pages


class _Target(TypedDict, total=False):
    all: bool
    namespace_id: bytes


def _target(space: Named | Opened | None) -> _Target:
    return {"all": True} if space is None else {"namespace_id": namespace_id(space)}


def namespace_id(space: Named | Opened) -> bytes:
    """Of a Namespace, of one that a client has opened or listed, or itself. Raises UsageError for
    anything else."""
    if isinstance(space, bytes) and len(space) == NAMESPACE_ID_BYTES:
        return space
    meant = space if isinstance(space, StoredNamespace) else getattr(space, "space", space)
    if not isinstance(meant, Namespace | StoredNamespace):
        raise UsageError(
            "a kvwarehouse.Namespace, an open or a listed one, or an id of 16 bytes is wanted here,"
            f" not a {type(space).__name__}",
            code="bad_namespace",
        )
    return meant.id


def _tier_check(tier: pb.TierCheck) -> TierCheck:
    return TierCheck(tier.tier, tier.pages, tier.bytes, tier.bad, tier.dropped, tier.dropped_bytes)


def _flushed(answer: pb.FlushResponse) -> FlushResult:
    return FlushResult(answer.flushed, answer.not_admitted, answer.pending)
