"""Who lives in a fleet, and what time it is: by the store's clock alone, because hosts disagree.

Each node writes its object every BEAT_S and lists all of them. What the store says of its own
object is the time; what it says of the others', who lives: those younger than ALIVE_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvwarehouse.remote.names import FleetNames
from kvwarehouse.remote.object_store import ObjectStore
from kvwarehouse.remote.store_gate import StoreGate

BEAT_S: Final = 60.0
RETRY_S: Final = 5.0
"""After a beat that failed."""
ALIVE_S: Final = 300.0
QUIET_S: Final = 180.0
"""A node whose last beat is older than this no longer relies on the others' counting it, well
before they stop."""

DAY_MS: Final = 86_400_000

DOUBT_S: Final = 86_400.0
"""A store's clock that jumps by more is doubted: days would expire that are not over."""
BELIEVED_AFTER: Final = 60
"""So many beats have to say the same of it, an hour's."""
AGREE_S: Final = 60.0


class StoreClock:
    """The store's clock, to the second: what it said last, and this host's monotonic clock since.
    While it is doubted, as it was before it jumped. `clock`: monotonic seconds. Any thread reads
    it, one sets it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ahead_s: float | None = None  # of the monotonic clock
        self._doubted_s: float | None = None  # ahead, as was said last
        self._doubted_times = 0  # that it said so

    @property
    def is_known(self) -> bool:
        return self._ahead_s is not None

    def set(self, store_s: float, at_s: float) -> None:
        """It was `store_s`, seconds since 1970, at `at_s` of the monotonic clock. The first time
        there is nothing to doubt it by."""
        ahead_s, before_s = store_s - at_s, self._ahead_s
        if before_s is None or abs(ahead_s - before_s) <= DOUBT_S or self._is_said_again(ahead_s):
            self._ahead_s, self._doubted_s, self._doubted_times = ahead_s, None, 0

    def _is_said_again(self, ahead_s: float) -> bool:
        agrees = self._doubted_s is not None and abs(ahead_s - self._doubted_s) <= AGREE_S
        self._doubted_times = self._doubted_times + 1 if agrees else 1
        self._doubted_s = ahead_s
        return self._doubted_times >= BELIEVED_AFTER

    @property
    def jump_s(self) -> float:
        """How far the store's clock has jumped, where that is doubted; else 0."""
        doubted_s, ahead_s = self._doubted_s, self._ahead_s
        return 0.0 if doubted_s is None or ahead_s is None else doubted_s - ahead_s

    def now_ms(self) -> int:
        if self._ahead_s is None:
            raise AssertionError("the store's clock is read before the store said what it is")
        return int((self._clock() + self._ahead_s) * 1000)

    def today(self) -> int:
        """Days since 1970."""
        return self.now_ms() // DAY_MS


class Nodes:
    """`node`: this one. One thread calls `round()`; any reads the rest."""

    def __init__(
        self,
        store: ObjectStore,
        names: FleetNames,
        node: int,
        store_clock: StoreClock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._names, self._node = store, names, node
        self.store_clock, self._clock = store_clock, clock
        self.gate: Final = StoreGate(clock)
        """Of all small objects that this node puts for the others to know of it."""
        self._due_s = clock()
        self._seen_since_s: float | None = None
        self._last_beat_s = float("-inf")
        self._living: frozenset[int] = frozenset({node})

    @property
    def living(self) -> int:
        """This one among them."""
        return len(self._living)

    @property
    def is_smallest(self) -> bool:
        return min(self._living) == self._node

    @property
    def is_seen(self) -> bool:
        """All others count this node: it has been there for two intervals, and is still."""
        since_s, now_s = self._seen_since_s, self._clock()
        if since_s is None or now_s - self._last_beat_s > QUIET_S:
            return False
        return now_s - since_s >= 2 * BEAT_S

    def round(self) -> None:
        """Writes and lists, if it is time."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + RETRY_S  # unless it goes through
        name = self._names.node(self._node)
        with self.gate.call():
            self._store.put(name, f"{self._node:016x}".encode())
        written_s = self._clock()
        found = {item.name: item.modified_s for item in self._store.list(self._names.nodes_prefix)}
        mine_s = found.get(name)
        if mine_s is None:
            return  # a store that lists late, or somebody who deletes
        self.store_clock.set(mine_s, (now_s + written_s) / 2)
        self._count(found, mine_s)
        if now_s - self._last_beat_s > QUIET_S:
            self._seen_since_s = now_s
        self._last_beat_s, self._due_s = now_s, now_s + BEAT_S

    def _count(self, found: dict[str, float], now_s: float) -> None:
        living = {
            node
            for name, modified_s in found.items()
            if (node := self._names.node_of(name)) is not None and now_s - modified_s < ALIVE_S
        }
        self._living = frozenset(living | {self._node})
