"""The administrative calls of the service, as plain values. Thread-safe as its channel is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvwarehouse.client.channel import Channel, server_wait_s
from kvwarehouse.errors import UsageError
from kvwarehouse.miss_ratio import MissRatio
from kvwarehouse.types import BadCopy, CheckProgress, FlushResult, Namespace, TierCheck
from kvwarehouse.wire import MAX_LIST_PAGES, namespace_from_wire, namespace_to_wire, plain
from kvwarehouse.wire import warehouse_pb2 as pb

_CHECK_TIMEOUT_S = 3600.0
# The service takes 0 for "as long as the call may last".
_LEAST_WAIT_S = 0.001


@dataclass(frozen=True)
class StoredNamespace:
    """A namespace that a warehouse keeps."""

    space: Namespace
    ordinal: int
    clear_epoch: int
    created_at_ns: int


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


class Admin:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def open_namespace(self, space: Namespace, timeout_s: float | None = None) -> None:
        """Registers `space`, or finds it, within timeout_s (None: the channel's). Raises UsageError
        where its pages fit no slab."""
        request = pb.OpenNamespaceRequest(namespace=namespace_to_wire(space), id=space.id)
        answer = self._channel.call("OpenNamespace", request, timeout_s)
        if answer.namespace.id != space.id:
            raise UsageError(
                f"{self._channel.address} computes another id for the namespace; client and daemon"
                " are of versions that do not fit, upgrade the older",
                code="bad_namespace",
            )

    def status(self) -> dict[str, Any]:
        answer = self._channel.call("Status", pb.StatusRequest())
        return plain(answer.status)

    def namespaces(self) -> list[StoredNamespace]:
        answer = self._channel.call("ListNamespaces", pb.ListNamespacesRequest())
        return [
            StoredNamespace(
                namespace_from_wire(info.fields),
                info.ordinal,
                info.clear_epoch,
                info.created_at_ns,
            )
            for info in answer.namespaces
        ]

    def pages(self, space: Namespace) -> Iterator[StoredPage]:
        """All pages of a namespace, fetched 1,000 at a time, so what changes meanwhile may or may
        not be among them."""
        after = 0
        while True:
            request = pb.ListPagesRequest(namespace_id=space.id, after=after, limit=MAX_LIST_PAGES)
            answer = self._channel.call("ListPages", request)
            for page in answer.pages:
                yield StoredPage(
                    page.id,
                    page.key,
                    page.parent,
                    page.position,
                    tuple(page.tiers),
                    page.bytes,
                    page.sealed_at_ns,
                )
            if answer.next <= after:
                return
            after = answer.next

    def clear(self, space: Namespace | None) -> int:
        request = pb.ClearRequest(**_target(space))
        return int(self._channel.call("Clear", request).pages)

    def evict(self, space: Namespace | None, pages: int, tiers: str) -> int:
        request = pb.EvictRequest(pages=pages, tiers=tiers, **_target(space))
        return int(self._channel.call("Evict", request).pages)

    def flush(self, timeout_s: float) -> FlushResult:
        request = pb.FlushRequest(timeout_s=max(_LEAST_WAIT_S, server_wait_s(timeout_s)))
        return _flushed(self._channel.call("Flush", request, timeout_s or None))

    def drain(self, timeout_s: float) -> FlushResult:
        request = pb.DrainRequest(timeout_s=max(_LEAST_WAIT_S, server_wait_s(timeout_s)))
        return _flushed(self._channel.call("Drain", request, timeout_s or None).flush)

    def sweep(self) -> int:
        return int(self._channel.call("Sweep", pb.SweepRequest()).pages)

    def miss_ratio(self, space: Namespace | None) -> MissRatio:
        answer = self._channel.call("MissRatio", pb.MissRatioRequest(**_target(space)))
        return MissRatio(
            answer.uses,
            answer.uses_lost,
            answer.since_s,
            answer.share,
            tuple(answer.sizes_bytes),
            tuple(answer.hits),
        )

    def check(self, space: Namespace | None, *, repair: bool) -> Iterator[CheckProgress]:
        request = pb.CheckRequest(repair=repair, **_target(space))
        for answer in self._channel.stream("Check", request, _CHECK_TIMEOUT_S):
            yield CheckProgress(
                tuple(_tier_check(tier) for tier in answer.tiers),
                tuple(BadCopy(page.key, page.tier, page.reason) for page in answer.bad),
                answer.done,
            )


def _target(space: Namespace | None) -> dict[str, Any]:
    return {"all": True} if space is None else {"namespace_id": space.id}


def _tier_check(tier: Any) -> TierCheck:
    return TierCheck(tier.tier, tier.pages, tier.bytes, tier.bad, tier.dropped, tier.dropped_bytes)


def _flushed(answer: Any) -> FlushResult:
    return FlushResult(answer.flushed, answer.not_admitted, answer.pending)
