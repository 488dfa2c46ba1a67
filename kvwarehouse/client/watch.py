"""What enters and leaves the tiers of a warehouse, as it happens. Stateless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvwarehouse.client.admin import Named, Opened, namespace_id
from kvwarehouse.client.rpc import Call
from kvwarehouse.wire import warehouse_pb2 as pb

LONGEST_WATCH_S: Final = 86_400.0


@dataclass(frozen=True)
class PageChange:
    """A page entered tiers, or left them. What was stored also says of which tokens it is."""

    stored: bool
    """False: it was removed."""
    namespace_id: bytes
    key: bytes
    tiers: tuple[str, ...]
    """Those that it entered or left: "dram", "nvme"."""
    position: int
    parent: bytes = b""
    tokens: bytes = b""
    """Packed uint32, little-endian; empty where the page was stored by the engine's key."""
    engine_key: bytes = b""


@dataclass(frozen=True)
class Changes:
    """One message of a watch; an empty one says that the daemon is still there."""

    changes: tuple[PageChange, ...]
    """In the order in which they happened; a page after its parent."""
    synced: bool
    """All that was stored when the watch began has been said."""


def watch(space: Named | Opened | None) -> Call[pb.WatchResponse, Changes]:
    """Its answers are streamed."""
    request = pb.WatchRequest(namespace_id=b"" if space is None else namespace_id(space))
    return Call("Watch", request, _changes, LONGEST_WATCH_S)


def _changes(answer: pb.WatchResponse) -> Changes:
    return Changes(tuple(_change(change) for change in answer.changes), answer.synced)


def _change(change: pb.PageChange) -> PageChange:
    return PageChange(
        change.kind == pb.PageChange.STORED,
        change.namespace_id,
        change.key,
        tuple(change.tiers),
        change.position,
        change.parent,
        change.tokens,
        change.engine_key,
    )
