"""The gRPC service kvwarehouse.v1.Warehouse: requests in, answers out. What a call does is in
warehouse.py and transfer.py; errors, bounds and watching are the interceptor's.

Thread-safe: called by the threads of several servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kvwarehouse import wire
from kvwarehouse.daemon.deadline import LONGEST_CHECK_S, Deadline
from kvwarehouse.daemon.keeps import Keeps
from kvwarehouse.daemon.ledger import NamespaceRecord
from kvwarehouse.daemon.request_notes import RequestNotes
from kvwarehouse.daemon.snapshot import Snapshots
from kvwarehouse.daemon.transfer import GrpcTransfer, span
from kvwarehouse.daemon.warehouse import REMOTE_WITHIN_S, DaemonWarehouse
from kvwarehouse.daemon.watching import Watches
from kvwarehouse.daemon.who_has import FoundPrefixes, WhoHas
from kvwarehouse.daemon.why import Why
from kvwarehouse.errors import UsageError
from kvwarehouse.types import FlushResult, TierCheck
from kvwarehouse.wire import namespace_pb2
from kvwarehouse.wire import warehouse_pb2 as pb

_DEFAULT_TIERS = "dram"
_LAST_PAGE = 2**32 - 1  # PageId of native/base/types.h


class WarehouseService(wire.WarehouseServicer):
    def __init__(
        self,
        warehouse: DaemonWarehouse,
        transfer: GrpcTransfer,
        snapshots: Snapshots,
        watches: Watches,
        keeps: Keeps,
        drain: Callable[[bool, str], bool],
    ) -> None:
        """drain(on, who): takes no stores, or takes them again; whether that was a change."""
        self._warehouse = warehouse
        self._transfer = transfer
        self._snapshots = snapshots
        self._watches = watches
        self._keeps = keeps
        prefixes = FoundPrefixes(warehouse, transfer)
        self._who_has = WhoHas(prefixes, snapshots)
        self._why = Why(warehouse, prefixes)
        self._requests = RequestNotes(warehouse)
        self._drain = drain

    def OpenNamespace(
        self, request: pb.OpenNamespaceRequest, context: grpc.ServicerContext
    ) -> pb.OpenNamespaceResponse:
        space = wire.namespace_from_wire(request.namespace)
        if request.id and request.id != space.id:
            raise UsageError(
                f"the client computes the namespace's id as {request.id.hex()} and this daemon as "
                f"{space.id.hex()}: their versions differ; use the same kvwarehouse on both sides",
                code="namespace_id_differs",
            )
        record = self._warehouse.open_namespace(space)
        core = self._snapshots.serving().core
        return pb.OpenNamespaceResponse(
            namespace=self._warehouse.info(record),
            warehouse_id=bytes.fromhex(core.warehouse_id),
            incarnation=core.incarnation,
        )

    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupResponse:
        record = self._warehouse.namespace(request.namespace_id)
        prefix = wire.prefix_from_wire(request.prefix)
        whole = span(record, prefix, first=0, pages=None, shard=0)
        dram, nvme, remote = self._transfer.lookup(whole)
        pages = dram + nvme + remote
        return pb.LookupResponse(
            pages=pages,
            tokens=pages * record.space.page_tokens,
            dram_pages=dram,
            nvme_pages=nvme,
            remote_pages=remote,
        )

    def Store(
        self, request_iterator: Iterator[pb.StoreRequest], context: grpc.ServicerContext
    ) -> pb.StoreResponse:
        head = next(request_iterator, pb.StoreRequest())
        part = head.WhichOneof("part")
        if part not in ("header", "since"):
            raise UsageError("the first message of a store must be its header", code="no_header")
        since = head.since.clear_epoch if part == "since" else None
        header = head.since.header if part == "since" else head.header
        pages = span(
            self._warehouse.namespace(header.namespace_id),
            wire.prefix_from_wire(header.prefix),
            first=header.first,
            pages=header.pages,
            shard=header.shard,
        )
        stored, already, dropped = self._transfer.store(
            pages, _data(request_iterator), Deadline.of(context), since
        )
        return pb.StoreResponse(stored=stored, already=already, dropped=dropped)

    def Load(
        self, request: pb.LoadRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.LoadResponse]:
        record = self._warehouse.namespace(request.namespace_id)
        prefix = wire.prefix_from_wire(request.prefix)
        pages = span(
            record, prefix, first=request.first, pages=request.pages or None, shard=request.shard
        )
        missed: dict[str, int] = {}
        timeout_s = max(0.0, request.timeout_s)
        for part in self._transfer.load(pages, timeout_s, Deadline.of(context), missed):
            if isinstance(part, bytes):
                yield pb.LoadResponse(data=part)
            else:
                yield pb.LoadResponse(summary=pb.LoadSummary(pages=part, missed=missed))

    def Release(
        self, request: pb.ReleaseRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseResponse:
        record = self._warehouse.namespace(request.namespace_id)
        prefix = wire.prefix_from_wire(request.prefix)
        rest = span(record, prefix, first=request.first, pages=None, shard=0)
        return pb.ReleaseResponse(pages=self._transfer.release(rest))

    def Keep(self, request: pb.KeepRequest, context: grpc.ServicerContext) -> pb.KeepResponse:
        return self._keeps.keep(request, Deadline.of(context))

    def ListKeeps(
        self, request: pb.ListKeepsRequest, context: grpc.ServicerContext
    ) -> pb.ListKeepsResponse:
        return self._keeps.listed()

    def RemoveKeeps(
        self, request: pb.RemoveKeepsRequest, context: grpc.ServicerContext
    ) -> pb.RemoveKeepsResponse:
        return self._keeps.remove(request)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        return pb.StatusResponse(status=self._snapshots.take())

    def ListNamespaces(
        self, request: pb.ListNamespacesRequest, context: grpc.ServicerContext
    ) -> pb.ListNamespacesResponse:
        listed: list[namespace_pb2.NamespaceInfo] = []
        size_bytes = 0
        for record in self._warehouse.namespaces()[request.after :]:
            info = self._warehouse.info(record)
            size_bytes += info.ByteSize()
            if listed and size_bytes > wire.MAX_LIST_BYTES:
                more = request.after + len(listed)
                return pb.ListNamespacesResponse(namespaces=listed, next=more)
            listed.append(info)
        return pb.ListNamespacesResponse(namespaces=listed)

    def ListPages(
        self, request: pb.ListPagesRequest, context: grpc.ServicerContext
    ) -> pb.ListPagesResponse:
        record = self._warehouse.namespace(request.namespace_id)
        if request.limit > wire.MAX_LIST_PAGES:
            raise UsageError(
                f"limit {request.limit} is over {wire.MAX_LIST_PAGES} pages an answer; ask again "
                "with the answer's next",
                code="limit_too_large",
            )
        if request.after > _LAST_PAGE:
            raise UsageError(
                f"after {request.after} is no page's place in the index; begin with 0, then give "
                "the last answer's next",
                code="bad_page",
            )
        limit = request.limit or wire.MAX_LIST_PAGES
        pages = self._warehouse.pages(record, request.after, limit)
        more = pages[-1]["id"] + 1 if len(pages) >= limit else 0
        return pb.ListPagesResponse(pages=[_page(page) for page in pages], next=more)

    def Clear(self, request: pb.ClearRequest, context: grpc.ServicerContext) -> pb.ClearResponse:
        cleared = self._warehouse.clear(
            self._target(request),
            forget=request.forget,
            remote_within_s=min(REMOTE_WITHIN_S, Deadline.of(context).remaining_s() / 2),
            who=context.peer(),
        )
        return pb.ClearResponse(pages=cleared.pages, epoch=cleared.epoch, remote=cleared.remote)

    def Evict(self, request: pb.EvictRequest, context: grpc.ServicerContext) -> pb.EvictResponse:
        if not 1 <= request.pages <= wire.MAX_EVICT_PAGES:
            raise UsageError(
                f"pages {request.pages} is out of range; evict 1 to {wire.MAX_EVICT_PAGES} a call",
                code="bad_count",
            )
        tiers = request.tiers or _DEFAULT_TIERS
        pages, nvme = self._warehouse.evict(
            self._target(request), request.pages, tiers, who=context.peer()
        )
        return pb.EvictResponse(pages=pages, nvme_pages=nvme)

    def Flush(self, request: pb.FlushRequest, context: grpc.ServicerContext) -> pb.FlushResponse:
        timeout_s = Deadline.of(context).within_s(request.timeout_s)
        return _flushed(self._warehouse.flush(timeout_s))

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainResponse:
        deadline = Deadline.of(context)
        self._drain(True, context.peer())
        flushed = self._warehouse.flush(deadline.within_s(request.timeout_s))
        return pb.DrainResponse(flush=_flushed(flushed))

    def Undrain(
        self, request: pb.UndrainRequest, context: grpc.ServicerContext
    ) -> pb.UndrainResponse:
        return pb.UndrainResponse(drained=self._drain(False, context.peer()))

    def MissRatio(
        self, request: pb.MissRatioRequest, context: grpc.ServicerContext
    ) -> pb.MissRatioResponse:
        ordinal = self._warehouse.ordinal(self._target(request))
        return pb.MissRatioResponse(**self._warehouse.miss_ratio(ordinal))

    def Sweep(self, request: pb.SweepRequest, context: grpc.ServicerContext) -> pb.SweepResponse:
        return pb.SweepResponse(pages=self._warehouse.sweep())

    def Check(
        self, request: pb.CheckRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.CheckResponse]:
        target = self._target(request)
        deadline = Deadline.of(context, LONGEST_CHECK_S)
        for part in self._warehouse.check(target, repair=request.repair, deadline=deadline):
            yield pb.CheckResponse(
                checked=part.checked,
                bytes=part.size_bytes,
                quarantined=part.quarantined,
                bad=[pb.BadPage(key=bad.key, reason=bad.reason, tier=bad.tier) for bad in part.bad],
                done=part.done,
                tiers=[_tier_check(tier) for tier in part.tiers],
            )

    def Watch(
        self, request: pb.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchResponse]:
        record = self._warehouse.namespace(request.namespace_id) if request.namespace_id else None
        yield from self._watches.stream(record, context)

    def WhoHas(self, request: pb.WhoHasRequest, context: grpc.ServicerContext) -> pb.WhoHasResponse:
        return self._who_has.answer(request)

    def Why(self, request: pb.WhyRequest, context: grpc.ServicerContext) -> pb.WhyResponse:
        return self._why.answer(request)

    def NoteRequests(
        self, request: pb.NoteRequestsRequest, context: grpc.ServicerContext
    ) -> pb.NoteRequestsResponse:
        return self._requests.note(request, Deadline.of(context))

    def ListRequests(
        self, request: pb.ListRequestsRequest, context: grpc.ServicerContext
    ) -> pb.ListRequestsResponse:
        return self._requests.list(request)

    def _target(self, request: Any) -> NamespaceRecord | None:
        """The namespace that a request names, None for all. Neither is refused: an empty request
        must not clear a warehouse."""
        which = request.WhichOneof("target")
        if which == "namespace_id":
            return self._warehouse.namespace(request.namespace_id)
        if which == "all" and request.all:
            return None
        raise UsageError(
            "the request names no namespace; set namespace_id, or all", code="no_target"
        )


def _data(requests: Iterator[pb.StoreRequest]) -> Iterator[bytes]:
    for request in requests:
        if request.WhichOneof("part") != "data":
            raise UsageError("a store has one header; what follows is data", code="second_header")
        if len(request.data) > wire.CHUNK_BYTES:
            raise UsageError(
                f"a chunk has {len(request.data)} bytes; send at most {wire.CHUNK_BYTES}",
                code="chunk_too_large",
            )
        yield request.data


def _page(page: dict[str, Any]) -> pb.PageInfo:
    message = pb.PageInfo()
    wire.fill(message, page)
    return message


def _tier_check(tier: TierCheck) -> pb.TierCheck:
    return pb.TierCheck(
        tier=tier.tier,
        pages=tier.pages,
        bytes=tier.size_bytes,
        bad=tier.damaged,
        dropped=tier.dropped,
        dropped_bytes=tier.dropped_bytes,
    )


def _flushed(result: FlushResult) -> pb.FlushResponse:
    return pb.FlushResponse(
        flushed=result.flushed, not_admitted=result.not_admitted, pending=result.pending
    )
