"""One node at a time cleans up: who takes the turn of these ten minutes first, or, where the store
does not heed put-if-absent, the living node with the smallest number.

A sweep goes on over rounds, for STEP_S in each, so that the node's beats come in time. One that
fails ends; the next turn begins another. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from kvwarehouse.errors import TransportError
from kvwarehouse.remote.capacity import Capacity
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.nodes import DAY_MS, Nodes, StoreClock
from kvwarehouse.remote.object_store import ObjectStore
from kvwarehouse.remote.sweep import TURN_MS, Sweep, days_over, days_too_many

STEP_S: Final = 2.0


class Janitor:
    """`clock`: monotonic seconds. `removed`: is told which pages were deleted."""

    def __init__(
        self,
        store: ObjectStore,
        names: FleetNames,
        nodes: Nodes,
        store_clock: StoreClock,
        capacity: Capacity,
        capacity_bytes: int,
        ttl_days: int,
        removed: Callable[[list[PagesName]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._names, self._nodes = store, names, nodes
        self._store_clock, self._capacity, self._clock = store_clock, capacity, clock
        self._capacity_bytes, self._ttl_days = capacity_bytes, ttl_days
        self._removed = removed
        self._turn = -1
        self._sweep: Sweep | None = None
        self._steps: Iterator[None] = iter(())
        self._gone: set[int] = set()  # days, once the sweep is through
        self._deleted = 0

    @property
    def deleted_objects(self) -> int:
        """Since the start, of all kinds."""
        under_way = self._sweep.swept.objects.total() if self._sweep else 0
        return self._deleted + under_way

    def round(self, *, put_if_absent: bool) -> None:
        """`put_if_absent`: the store heeds it."""
        if self._sweep is None and self._takes_turn(put_if_absent):
            self._begin()
        until_s = self._clock() + STEP_S
        while self._sweep is not None and self._clock() < until_s:
            self._step()

    def _takes_turn(self, put_if_absent: bool) -> bool:
        turn = self._store_clock.now_ms() // TURN_MS
        if turn == self._turn:
            return False
        if put_if_absent:
            takes = self._store.put(self._names.turn(turn), b"-", if_absent=True)
        else:
            takes = self._nodes.is_smallest
        self._turn = turn
        return takes

    def _begin(self) -> None:
        now_ms = self._store_clock.now_ms()
        today = now_ms // DAY_MS
        bytes_of_days = self._capacity.bytes_of_days(today) or {}
        too_many = days_too_many(bytes_of_days, today, self._ttl_days, self._capacity_bytes)
        self._gone = too_many | days_over(bytes_of_days, today, self._ttl_days)
        self._sweep = Sweep(
            self._store,
            self._names,
            now_ms,
            self._ttl_days,
            too_many,
            removed=self._removed,
        )
        self._steps = self._sweep.steps()

    def _step(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            for day in self._gone:
                self._capacity.dropped(day)
            self._end()
        except TransportError:
            self._end()
            raise

    def _end(self) -> None:
        assert self._sweep is not None
        self._deleted += self._sweep.swept.objects.total()
        self._sweep = None
