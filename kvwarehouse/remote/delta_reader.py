"""What the other nodes have put lately (deltas.py), read from the store into the presence filter:
a lookup here finds it seconds later, and not after the next listing.

Deltas are called by the time of the store's clock at which they were begun, and may be there only
LATE_MS later. So each reading lists again from that long before, and knows those that it has read.
What a reader misses all the same, because it was cut off for longer, its next listing has. Not
thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvwarehouse.remote import delta
from kvwarehouse.remote.deltas import interval_s
from kvwarehouse.remote.listing import Sink, put_into
from kvwarehouse.remote.names import FleetNames
from kvwarehouse.remote.nodes import Nodes
from kvwarehouse.remote.object_store import ObjectStore

LATE_MS: Final = 60_000
READS_MAX: Final = 64
"""Deltas of one round, oldest first; the next one goes on."""


class DeltaReader:
    """`node`: this one, whose own deltas say nothing new. `clock`: monotonic seconds."""

    def __init__(
        self,
        store: ObjectStore,
        names: FleetNames,
        sink: Sink,
        node: int,
        nodes: Nodes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._names, self._sink = store, names, sink
        self._node, self._nodes = node, nodes
        self._store_clock, self._clock = nodes.store_clock, clock
        self._due_s = clock()
        self._read: set[str] = set()  # of those that are listed again
        self._after_ms: int | None = None

    def round(self) -> None:
        """Lists, if it is time, and reads what is new."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + interval_s(self._nodes.living)
        now_ms = self._store_clock.now_ms()
        # What is older than the first reading is in the listing of the start.
        since_ms = now_ms - LATE_MS if self._after_ms is None else self._after_ms
        listed = self._listed(max(since_ms, 0))
        unread = [name for name in listed if name not in self._read]
        for name in unread[:READS_MAX]:
            self._take(name)
            self._read.add(name)
        if len(unread) > READS_MAX:
            self._due_s = now_s
        else:
            self._after_ms = now_ms - LATE_MS
            self._read.intersection_update(listed)

    def _listed(self, since_ms: int) -> list[str]:
        """Of other nodes, in the order of their times."""
        found = self._store.list(self._names.deltas_prefix, self._names.deltas_after(since_ms))
        return sorted(
            item.name
            for item in found
            if (told := self._names.delta_of(item.name)) is not None and told[1] != self._node
        )

    def _take(self, name: str) -> None:
        data = self._store.get(name, 0, delta.DELTA_BYTES_MAX)
        told = None if data is None else delta.decode(self._names.fleet, data)
        if told is not None:  # else it is gone already, or nobody's of this version
            put_into(self._sink.put, [entry.name for entry in told.entries])
