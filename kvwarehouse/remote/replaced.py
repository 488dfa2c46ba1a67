"""Objects of earlier days whose pages are in the store under a later day's name too. Each would
count against the capacity until its day goes, so that what is used daily is there once for each day
of the TTL.

They stay for AFTER_S, because other nodes may know of nothing newer before their next listing: they
would read in vain, and put once more what they could have copied. What waits is this process's
alone: what it has not deleted in its time goes with its day.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice, takewhile
from typing import Final

from kvwarehouse.remote import listing
from kvwarehouse.remote.object_store import ObjectStore

AFTER_S: Final = listing.INTERVAL_S + 600.0
"""Longer than an interval by what a listing takes."""
WAITING_MAX: Final = 65_536
"""Beyond it they go with their day."""
BATCH: Final = 1000


class ReplacedObjects:
    """One thread calls `round()`; any adds. `clock`: monotonic seconds."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._waiting: deque[tuple[float, str]] = deque()  # from when on, the object's name
        self._deleted = 0

    @property
    def deleted(self) -> int:
        """Since the start."""
        with self._lock:
            return self._deleted

    def add(self, name: str) -> None:
        with self._lock:
            if len(self._waiting) < WAITING_MAX:
                self._waiting.append((self._clock() + AFTER_S, name))

    def round(self) -> None:
        """Deletes some that are due, in one call of the store. Where it fails they stay due."""
        now_s = self._clock()
        with self._lock:
            due = list(islice(takewhile(lambda each: each[0] <= now_s, self._waiting), BATCH))
        if not due:
            return
        self._store.delete([name for _, name in due])
        with self._lock:
            for _ in due:
                self._waiting.popleft()
            self._deleted += len(due)
