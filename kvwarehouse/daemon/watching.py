"""Watch: what enters and leaves the tiers, as messages. Thread-safe; a stream holds its thread.

Every watcher has a feed of the core to itself, bounded there: one that reads too slowly loses it
and is cut off, and the core never waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import grpc

from kvwarehouse.daemon.ledger import NamespaceRecord
from kvwarehouse.daemon.warehouse import DaemonWarehouse
from kvwarehouse.errors import CapacityError, TransportError
from kvwarehouse.wire import warehouse_pb2 as pb

CHANGES: Final = 512
"""Of one message, at most."""

MESSAGE_BYTES: Final = 1 << 20
"""Of one message, about: pages of many tokens make it full sooner."""

KEEPALIVE_S: Final = 5.0
"""Between messages at most, so that each side knows that the other is there."""

_WAIT_S: Final = 0.5
_TIERS: Final = {1: ("dram",), 2: ("nvme",), 3: ("dram", "nvme")}
_KINDS: Final = {"stored": pb.PageChange.STORED, "removed": pb.PageChange.REMOVED}


class Watches:
    def __init__(self, warehouse: DaemonWarehouse) -> None:
        self._warehouse = warehouse
        self._ending = threading.Event()

    def end(self) -> None:
        """Ends all of them; the daemon is on its way out."""
        self._ending.set()

    def stream(
        self, record: NamespaceRecord | None, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchResponse]:
        """Until the call ends. Raises CapacityError (code "watcher_too_slow"), and at the bound of
        watchers "too_many_watchers"."""
        feed = self._warehouse.watch(record)
        # A watcher that goes away wakes the thread that waits for something to tell it.
        context.add_callback(feed.close)
        said_at = time.monotonic()
        try:
            while context.is_active():
                taken = feed.take(_WAIT_S)
                if self._ending.is_set():
                    raise TransportError("the daemon is stopping; watch again", code="stopping")
                if taken["lost"]:
                    raise CapacityError(
                        "this watcher read too slowly and changes were dropped; watch again, which "
                        "begins with all that is stored",
                        code="watcher_too_slow",
                    )
                for message in self._messages(taken["items"]):
                    yield message
                    said_at = time.monotonic()
                if time.monotonic() - said_at > KEEPALIVE_S:
                    yield pb.WatchResponse()
                    said_at = time.monotonic()
        finally:
            feed.close()

    def _messages(self, items: list[Any]) -> Iterator[pb.WatchResponse]:
        message, size_bytes = pb.WatchResponse(), 0
        for item in items:
            if item[0] == "synced":
                message.synced = True
            if item[0] not in _KINDS:
                continue
            message.changes.append(self._change(item))
            size_bytes += 128 + len(item[7])
            if len(message.changes) >= CHANGES or size_bytes >= MESSAGE_BYTES:
                yield message
                message, size_bytes = pb.WatchResponse(), 0
        if message.changes or message.synced:
            yield message

    def _change(self, item: Any) -> pb.PageChange:
        kind, tiers, namespace_id, position, key, parent, by_tokens, witness = item
        change = pb.PageChange(
            kind=_KINDS[kind],
            namespace_id=namespace_id,
            key=key,
            tiers=_TIERS[tiers],
            position=position,
        )
        if kind == "stored":
            change.parent = parent
            if by_tokens:
                change.tokens = witness
            else:
                change.engine_key = witness
        return change
