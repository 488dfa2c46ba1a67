"""What becomes of a run that clients wait for: the range of its object that is wanted is read once,
judged and stored natively. Each run ends with one of core.GET_ENDS, and the number of its pages
that are stored here now.

Thread-safe: a get thread holds one object, from the get to the end of the fill; all of them hold
BODIES_BYTES at most. What comes too late for who waited is stored all the same, for the next one;
but not where it may have been cleared meanwhile, and this host has not heard of it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvwarehouse.errors import TransportError
from kvwarehouse.remote.damaged_objects import DamagedObjects
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import ObjectStore
from kvwarehouse.remote.read_rates import ReadFigures, ReadRates
from kvwarehouse.remote.store_gate import StoreGate
from kvwarehouse.remote.under_way import RunTurn, UnderWay

if TYPE_CHECKING:
    from kvwarehouse.core import FilledRun, RunToGet

BODIES_BYTES: Final = 128 << 20
"""Of objects in memory. One that is larger is alone."""

AFTER_FRESH_S: Final = 5.0
"""What was under way is stored until then, once it is not known any more what was cleared
(epochs.FRESH_S)."""

_FILL_S: Final = 0.5
"""What storing an object has at least, though nobody may wait for it any more."""

_CLAIMED: Final = frozenset({"place", "shape"})
"""What may be wrong with what a client has said of the object, and not with the object."""

Fill = Callable[["RunToGet", Any, float], "FilledRun"]
"""Stores a run's pages from an object's records within so many seconds."""


class GetEnded(NamedTuple):
    """`end`: one of core.GET_ENDS. `pages`: of the run that are stored here now."""

    end: str
    pages: int = 0


class Taken(NamedTuple):
    run: RunToGet
    turn: RunTurn


@dataclass(frozen=True)
class GetSource:
    """Where objects come from, and who hears of those that do not. `remove`: takes an object, by
    its last page's key, epoch and day, out of what the store has as far as this host knows.
    `fresh_until_s`: until when it is known what was cleared (epochs.Epochs)."""

    store: ObjectStore
    names: FleetNames
    remove: Callable[[bytes, int, int], object]
    damaged: DamagedObjects
    fresh_until_s: Callable[[], float]


class Gets:
    """`gate`: whether the store lets this host read. `clock`: seconds of the clock by which the
    source is fresh, which goes on while the host sleeps."""

    def __init__(
        self, source: GetSource, fill: Fill, gate: StoreGate, clock: Callable[[], float]
    ) -> None:
        self._from, self._fill, self._gate, self._clock = source, fill, gate, clock
        self._under_way = UnderWay(BODIES_BYTES)
        self._rates = ReadRates(clock)
        self._taking = threading.Lock()
        self._lock = threading.Lock()
        self._ends: Counter[str] = Counter()
        self._damaged: Counter[str] = Counter()
        self._get_bytes = 0

    @property
    def ends(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._ends)

    @property
    def damaged(self) -> Mapping[str, int]:
        """Runs by what was wrong with their object."""
        with self._lock:
            return dict(self._damaged)

    @property
    def get_bytes(self) -> int:
        with self._lock:
            return self._get_bytes

    def figures(self) -> ReadFigures:
        """How fast the store is. Called about once a second."""
        return self._rates.figures()

    def take(self, next_run: Callable[[], RunToGet | None]) -> Taken | None:
        """The next run for a thread to get, which has its turn from here on: one thread after the
        other, so that a run is known before those that go on from it are begun."""
        with self._taking:
            run = next_run()
            if run is None:
                return None
            return Taken(run, self._under_way.begin(run.key, run.end - run.begin))

    def get(self, taken: Taken) -> GetEnded:
        """How it ended. Raises what filling raises: the daemon is gone, or worse."""
        due_s = self._clock() + taken.run.within_s
        try:
            ended = self._ended(taken, due_s)
        finally:
            self._under_way.end(taken.turn)
        with self._lock:
            self._ends[ended.end] += 1
        return ended

    def _ended(self, taken: Taken, due_s: float) -> GetEnded:
        run, turn = taken
        if not self._gate.admit():
            return GetEnded("failed")
        has_room = self._under_way.wait_for_room(turn, max(due_s - self._clock(), 0))
        if not has_room or self._clock() >= due_s:
            return GetEnded("late")
        try:
            body = self._read(run)
        except TransportError as error:
            self._gate.failed(error)
            return GetEnded("failed")
        self._gate.succeeded()
        if body is None:
            self._forget(run)
            return GetEnded("missing")
        return self._filled(taken, body, due_s)

    def _read(self, run: RunToGet) -> memoryview | None:
        name = self._from.names.pages(PagesName(run.namespace_id, run.epoch, run.day, run.key))
        took = self._rates.begin()
        size_bytes = 0
        try:
            body = self._from.store.get(name, run.begin, run.end, took.first_byte)
            size_bytes = len(body) if body is not None else 0
            return body
        finally:
            took.end(size_bytes)
            with self._lock:
                self._get_bytes += size_bytes

    def _filled(self, taken: Taken, body: memoryview, due_s: float) -> GetEnded:
        run, turn = taken
        waited = True
        while (within_s := self._fill_s(due_s)) > 0:
            filled = self._fill(run, body, within_s)
            if filled.fault != "parent_missing" or not waited:
                return self._judged(run, filled)
            # Objects of one prompt come in any order. What was under way a moment ago may be
            # stored by now, so it is tried once more in any case.
            left_s = max(due_s - self._clock(), 0)
            waited = self._under_way.wait_for_end(filled.parent, turn, left_s)
        return GetEnded("late")

    def _judged(self, run: RunToGet, filled: FilledRun) -> GetEnded:
        if filled.end == "damaged":
            if filled.fault not in _CLAIMED:
                self._from.damaged.add(run.key, run.epoch)
                self._forget(run)
            with self._lock:
                self._damaged[filled.fault] += 1
        return GetEnded(filled.end, filled.pages)

    def _fill_s(self, due_s: float) -> float:
        """0 or less: too late for anybody. A clear that this host has not heard of takes nothing
        away here, so what it took from the store would be served from DRAM."""
        now_s = self._clock()
        return min(max(due_s - now_s, _FILL_S), self._from.fresh_until_s() + AFTER_FRESH_S - now_s)

    def _forget(self, run: RunToGet) -> None:
        """The object is not taken away: another host may have a better line. A damaged one is
        put anew by whoever has the pages again, or goes with its day."""
        self._from.remove(run.key, run.epoch, run.day)
