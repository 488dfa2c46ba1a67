"""WhoHas: the longest stored prefix of a prompt in each namespace that could have it, and how busy
this warehouse is. Thread-safe; reads shared memory, and counts as no lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvwarehouse.daemon.ledger import NamespaceRecord
from kvwarehouse.daemon.snapshot import Snapshots
from kvwarehouse.daemon.transfer import GrpcTransfer, TransferSpan, span
from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.errors import UsageError
from kvwarehouse.types import CHAIN_SCHEME, Tier
from kvwarehouse.wire import prefix_from_wire, status_pb2
from kvwarehouse.wire import warehouse_pb2 as pb

MAX_HOLDINGS: Final = 64


@dataclass(frozen=True)
class FoundPrefix:
    """What a namespace has of a prompt."""

    whole: TransferSpan
    pages: int
    """Of the longest prefix that the daemon's own tiers have."""
    dram_pages: int
    remote_pages: int
    """Behind those, of the remote store, probably."""


class FoundPrefixes:
    """`of`: the question of a WhoHas or a Why."""

    def __init__(self, warehouse: DaemonWarehouse, transfer: GrpcTransfer) -> None:
        self._warehouse = warehouse
        self._transfer = transfer

    def of(self, request: pb.WhoHasRequest | pb.WhyRequest) -> list[FoundPrefix]:
        """In each namespace that is asked for, the longest first. Raises UsageError for a namespace
        that is not known, or a prefix that is none."""
        prefix = prefix_from_wire(request.prefix)
        found: list[FoundPrefix] = []
        for record in self._asked(request, by_keys=prefix[1] is not None):
            # One whose pages no longer fit, or that is forgotten meanwhile, is not the core's.
            if held := self._held(span(record, prefix, first=0, pages=None, shard=0)):
                found.append(held)
        found.sort(key=lambda held: (-held.pages, -held.dram_pages))
        return found

    def _asked(
        self, request: pb.WhoHasRequest | pb.WhyRequest, *, by_keys: bool
    ) -> list[NamespaceRecord]:
        which = request.WhichOneof("of")
        if which == "namespace_id":
            return [self._warehouse.namespace(request.namespace_id)]
        return [
            record
            for record in self._warehouse.namespaces()
            # Who does not name a salted one is not told what those with the salt have asked.
            if not record.space.salt
            and (which is None or record.space.model == request.model)
            and by_keys == (record.space.hash_scheme != CHAIN_SCHEME)
        ]

    def _held(self, whole: TransferSpan) -> FoundPrefix | None:
        import numpy as np

        try:
            tiers = self._transfer.tiers(whole)
        except UsageError as error:
            if error.code != "namespace_unknown":
                raise
            return None
        missing = np.flatnonzero(~Tier.here(tiers))
        pages = int(missing[0]) if len(missing) else len(tiers)
        return FoundPrefix(
            whole,
            pages,
            dram_pages=int(np.count_nonzero(Tier.near(tiers[:pages]))),
            remote_pages=int(np.count_nonzero(tiers[pages:] == Tier.REMOTE)),
        )


class WhoHas:
    def __init__(self, prefixes: FoundPrefixes, snapshots: Snapshots) -> None:
        self._prefixes = prefixes
        self._snapshots = snapshots

    def answer(self, request: pb.WhoHasRequest) -> pb.WhoHasResponse:
        """Raises as FoundPrefixes.of."""
        held = self._prefixes.of(request)
        status = self._snapshots.serving()
        return pb.WhoHasResponse(
            warehouse_id=bytes.fromhex(status.core.warehouse_id),
            incarnation=status.core.incarnation,
            name=status.name,
            draining=status.core.draining,
            holdings=[_holding(each) for each in held[:MAX_HOLDINGS]],
            load=_load(status),
        )


def _holding(held: FoundPrefix) -> pb.Holding:
    space = held.whole.record.space
    return pb.Holding(
        namespace_id=space.id,
        model=space.model,
        page_tokens=space.page_tokens,
        page_bytes=space.page_bytes,
        shards=space.shards,
        pages=held.pages,
        tokens=held.pages * space.page_tokens,
        dram_pages=held.dram_pages,
        nvme_pages=held.pages - held.dram_pages,
    )


def _load(status: status_pb2.Status) -> pb.Load:
    nvme = status.core.tiers.nvme
    return pb.Load(
        streams=status.service.streams,
        streams_max=status.service.streams_max,
        sessions=status.core.sessions,
        promotions_in_flight=nvme.promotions_in_flight,
        nvme_read_bytes_per_s=nvme.read_bytes_per_s,
        nvme_write_queue_bytes=nvme.queued_bytes,
    )
