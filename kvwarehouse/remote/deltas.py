"""What this node has put, on its way to the others: an object of delta.py every few seconds.

Nothing is lost by a put of one that fails: what it had goes into the next. It may have been stored
all the same, so others may read of a put twice, but never not at all. Beyond WAITING_MAX entries
the oldest wait for the others' next listing; their bytes are told anyhow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from kvwarehouse.remote import delta
from kvwarehouse.remote.delta import Delta, DeltaEntry
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.nodes import Nodes, StoreClock
from kvwarehouse.remote.object_store import ObjectStore

INTERVAL_S: Final = 5.0
FEW_NODES: Final = 10
MORE_S: Final = 0.5
"""For each node above FEW_NODES, so that all together read no more."""
WAITING_MAX: Final = 8 * delta.ENTRIES_MAX


def interval_s(nodes: int) -> float:
    """Between two deltas of a node, and between two readings of the others', of so many nodes."""
    return INTERVAL_S + MORE_S * max(0, nodes - FEW_NODES)


class Deltas:
    """One thread calls `round()`; any adds."""

    def __init__(
        self,
        store: ObjectStore,
        names: FleetNames,
        node: int,
        nodes: Nodes,
        store_clock: StoreClock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._names, self._node, self._nodes = store, names, node, nodes
        self._store_clock, self._clock = store_clock, clock
        self._lock = threading.Lock()
        self._waiting: deque[DeltaEntry] = deque()
        self._put_bytes = 0  # that no delta has told
        self._due_s = clock()
        self._last_ms = 0

    @property
    def waiting(self) -> int:
        with self._lock:
            return len(self._waiting)

    def add(self, name: PagesName, size_bytes: int) -> None:
        with self._lock:
            self._waiting.append(DeltaEntry(name, -(-size_bytes // 1024)))
            self._put_bytes += size_bytes
            if len(self._waiting) > WAITING_MAX:
                self._waiting.popleft()

    def round(self) -> None:
        """Puts one, if it is time and there is something to say."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        with self._lock:
            told = list(islice(self._waiting, delta.ENTRIES_MAX))
            put_bytes = self._put_bytes
        if not told:
            return
        self._due_s = now_s + interval_s(self._nodes.living)
        # Each has a name of its own, also where the clock was set back.
        self._last_ms = max(self._last_ms + 1, self._store_clock.now_ms())
        name = self._names.delta(self._last_ms, self._node)
        with self._nodes.gate.call():
            encoded = delta.encode(self._names.fleet, Delta(self._node, put_bytes, told))
            self._store.put(name, encoded)
        self._strike(told, put_bytes)

    def _strike(self, told: list[DeltaEntry], put_bytes: int) -> None:
        with self._lock:
            self._put_bytes -= put_bytes
            for entry in told:
                # Some may have made room for later ones meanwhile.
                if self._waiting and self._waiting[0] is entry:
                    self._waiting.popleft()
