"""What the whole fleet has in its store, listed at the start and each hour, into a presence filter.

A listing goes on in threads of its own while `round()`s come by. One that fails leaves what it
found in the filter and what the last one counted, and is tried again: after RETRY_S, doubling to
RETRY_MAX_S. Not thread-safe but for `close()`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import ObjectStore
from kvwarehouse.remote.totals import StoredTotals
from kvwarehouse.remote.walk import Found, PagesWalk

INTERVAL_S: Final = 3600.0
RETRY_S: Final = 30.0
RETRY_MAX_S: Final = 600.0


class Sink(Protocol):
    """What of a presence file (core.PresenceFile) this package uses: it takes no days but those of
    its window, which ends at the one that it was advanced to. Thread-safe."""

    def advance(self, newest: int, today: int) -> None: ...

    def put(self, keys: bytes, epochs: Any, days: Any) -> Any: ...

    def remove(self, key: bytes, epoch: int, day: int) -> bool: ...


class Listing:
    """`clock`: monotonic seconds."""

    def __init__(
        self,
        store: ObjectStore,
        names: FleetNames,
        sink: Sink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._names, self._sink = store, names, sink
        self._clock = clock
        self._walk: PagesWalk | None = None
        self._totals = StoredTotals()
        self._due_s = clock()
        self.began_s = 0.0  # the last one that began
        self._retry_s = RETRY_S
        self._listed_s: float | None = None

    @property
    def is_due(self) -> bool:
        return self._walk is None and self._clock() >= self._due_s

    @property
    def listed_ago_s(self) -> float | None:
        """Since the last whole listing began. None: there was none yet."""
        return None if self._listed_s is None else self._clock() - self._listed_s

    def begin(self) -> None:
        self.began_s = self._clock()
        self._totals = StoredTotals()
        certain = self._names.nodes_prefix  # this node has beaten, or would not know the day
        self._walk = PagesWalk(self._store, self._names, self._found, certain=certain)
        self._walk.start()

    def end(self) -> StoredTotals | None:
        """What a listing counted that has ended; None while it goes on, or where it failed. Raises
        what it failed by, once."""
        if self._walk is None or not self._walk.has_ended:
            return None
        failure, self._walk = self._walk.failure, None
        if failure is not None:
            self._due_s = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
            raise failure
        self._listed_s, self._retry_s = self.began_s, RETRY_S
        self._due_s = self.began_s + INTERVAL_S
        return self._totals

    def join(self, timeout_s: float | None = None) -> bool:
        """True: none goes on."""
        return self._walk is None or self._walk.join(timeout_s)

    def close(self) -> None:
        walk = self._walk
        if walk is not None:
            walk.stop()

    def _found(self, found: Found) -> None:
        self._totals.add(found)
        put_into(self._sink.put, [name for name, _ in found])


def put_into(put: Callable[[bytes, Any, Any], object], names: Sequence[PagesName]) -> None:
    """`put`: a presence file's."""
    put(
        b"".join(name.key for name in names),
        np.fromiter((name.epoch for name in names), np.uint64, len(names)),
        np.fromiter((name.day for name in names), np.uint32, len(names)),
    )
