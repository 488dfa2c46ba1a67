"""The last batches of a stream of KV events, for subscribers that missed some. Thread-safe; bounded
in bytes."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from kvwarehouse.daemon.event_batch import Batch

OVERHEAD_BYTES: Final = 256
"""What a batch costs beside its payload, generously."""


class ReplayBuffer:
    def __init__(self, bound_bytes: int, first: int) -> None:
        """`first`: the sequence number that the first batch will have. Numbers rise by one."""
        self._bound_bytes = bound_bytes
        self._lock = threading.Lock()
        self._batches: deque[tuple[int, Batch]] = deque()
        self._bytes = 0
        self._next = first

    @property
    def next(self) -> int:
        """The number of the next batch."""
        with self._lock:
            return self._next

    def add(self, batch: Batch) -> int:
        """Keeps it, forgets the oldest beyond the bound, and returns its number."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._batches.append((number, batch))
            self._bytes += len(batch.payload) + OVERHEAD_BYTES
            while self._bytes > self._bound_bytes and len(self._batches) > 1:
                _, old = self._batches.popleft()
                self._bytes -= len(old.payload) + OVERHEAD_BYTES
            return number

    def since(self, number: int) -> list[tuple[int, Batch]] | None:
        """Batches from `number` on; where some of them are gone (or are of an earlier daemon), all
        since the last that began with AllBlocksCleared, which says as much. None: neither is here
        any more."""
        with self._lock:
            oldest = self._batches[0][0] if self._batches else self._next
            if number >= oldest:
                return [entry for entry in self._batches if entry[0] >= number]
            clears = [place for place, (_, batch) in enumerate(self._batches) if batch.clears]
            return list(self._batches)[clears[-1] :] if clears else None
