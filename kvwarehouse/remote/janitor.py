"""One node at a time cleans up: who takes the turn of these ten minutes first, or, where the store
does not heed put-if-absent or takes no put, the living node with the smallest number. A store that
is full has to be emptied before it takes anything.

A sweep goes on over rounds, for STEP_MS in each, so that the node's beats come in time. One that
fails ends; the next turn begins another. Not thread-safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from kvwarehouse.errors import TransportError
from kvwarehouse.remote.capacity import Capacity
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.nodes import DAY_MS, Nodes
from kvwarehouse.remote.object_store import ObjectStore
from kvwarehouse.remote.sweep import TURN_MS, Sweep, SweepRules, days_over, days_too_many

STEP_MS: Final = 2000


class Janitor:
    """`removed`: is told which pages were deleted."""

    def __init__(
        self,
        store: ObjectStore,
        names: FleetNames,
        nodes: Nodes,
        capacity: Capacity,
        ttl_days: int,
        removed: Callable[[list[PagesName]], None],
    ) -> None:
        self._store, self._names, self._nodes = store, names, nodes
        self._capacity, self._ttl_days, self._removed = capacity, ttl_days, removed
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
        """`put_if_absent`: the store heeds it. Nothing is old while its clock is doubted."""
        if self._nodes.store_clock.jump_s:
            return
        if self._sweep is None and self._takes_turn(put_if_absent):
            self._begin()
        until_ms = self._now_ms() + STEP_MS
        while self._sweep is not None and self._now_ms() < until_ms:
            self._step()

    def _takes_turn(self, put_if_absent: bool) -> bool:
        turn = self._now_ms() // TURN_MS
        if turn == self._turn:
            return False
        self._turn = turn
        if put_if_absent:
            with contextlib.suppress(TransportError), self._nodes.gate.call():
                return self._store.put(self._names.turn(turn), b"-", if_absent=True)
        return self._nodes.is_smallest

    def _begin(self) -> None:
        now_ms = self._now_ms()
        today = now_ms // DAY_MS
        bytes_of_days = self._capacity.bytes_of_days(today) or {}
        most = self._capacity.capacity_bytes
        too_many = days_too_many(bytes_of_days, today, self._ttl_days, most)
        self._gone = too_many | days_over(bytes_of_days, today, self._ttl_days)
        rules = SweepRules(now_ms, self._ttl_days, too_many)
        self._sweep = Sweep(self._store, self._names, rules, self._removed)
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

    def _now_ms(self) -> int:
        return self._nodes.store_clock.now_ms()
