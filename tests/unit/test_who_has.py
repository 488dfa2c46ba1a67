"""What WhoHas makes of namespaces that come and go."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvwarehouse.daemon.ledger import NamespaceRecord
from kvwarehouse.daemon.transfer import TransferSpan
from kvwarehouse.daemon.who_has import MAX_HOLDINGS, FoundPrefixes, WhoHas
from kvwarehouse.errors import UsageError
from kvwarehouse.types import Namespace, Tier
from kvwarehouse.wire import prefix_to_wire, status_pb2
from kvwarehouse.wire import warehouse_pb2 as pb


def record(number: int) -> NamespaceRecord:
    space = Namespace(
        model=f"m{number}", weights="w", dtype="b", layout="l/1", page_tokens=4, page_bytes=8
    )
    return NamespaceRecord(number, space, 0, 0)


class Parts:
    """Stands in for the warehouse, the transfer and the snapshots."""

    spaces = 2

    def namespaces(self) -> list[NamespaceRecord]:
        return [record(number) for number in range(self.spaces)]

    def tiers(self, whole: TransferSpan) -> Any:
        if whole.record.ordinal == 0:
            raise UsageError("it was forgotten meanwhile", code="namespace_unknown")
        stored = min(
            whole.record.ordinal, len(whole.tokens) // 4 if whole.tokens is not None else 0
        )
        tiers = [Tier.DRAM] * stored
        return np.array([*tiers, Tier.MISSING], np.uint8)

    def serving(self) -> status_pb2.Status:
        return status_pb2.Status(core=status_pb2.CoreStatus(warehouse_id="00" * 16))


def test_namespace_that_is_forgotten_meanwhile_is_left_out() -> None:
    parts: Any = Parts()
    request = pb.WhoHasRequest(prefix=prefix_to_wire(np.arange(8), None))
    answer = WhoHas(FoundPrefixes(parts, parts), parts).answer(request)
    assert [(each.model, each.pages) for each in answer.holdings] == [("m1", 1)]


def test_best_of_many_namespaces_are_told() -> None:
    parts: Any = Parts()
    parts.spaces = MAX_HOLDINGS + 10
    request = pb.WhoHasRequest(prefix=prefix_to_wire(np.arange(4 * parts.spaces), None))
    told = [
        each.pages for each in WhoHas(FoundPrefixes(parts, parts), parts).answer(request).holdings
    ]
    assert told == list(range(parts.spaces - 1, parts.spaces - 1 - MAX_HOLDINGS, -1))


def test_what_only_the_remote_store_has_is_told_as_nobodys() -> None:
    parts: Any = Parts()
    parts.tiers = lambda whole: np.array([Tier.NVME, Tier.REMOTE, Tier.REMOTE], np.uint8)
    request = pb.WhoHasRequest(prefix=prefix_to_wire(np.arange(12), None))
    answer = WhoHas(FoundPrefixes(parts, parts), parts).answer(request)
    assert [(each.pages, each.nvme_pages) for each in answer.holdings] == [(1, 1), (1, 1)]
