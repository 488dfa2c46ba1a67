"""What a node does in its fleet's store beside putting pages: it says that it lives, lists what
there is, keeps to the capacity, tells the others what it put, and cleans up.

One thread calls `round()` about once a second; a call of the store may hold it up for as long as
its deadline is. Any thread calls the rest, which never waits for the store. A store that fails
costs time: each part goes on where it was, and `round()` says what failed last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvwarehouse.errors import TransportError
from kvwarehouse.remote.capacity import Capacity
from kvwarehouse.remote.delta_reader import DeltaReader
from kvwarehouse.remote.deltas import Deltas
from kvwarehouse.remote.janitor import Janitor
from kvwarehouse.remote.listing import Listing, Sink, put_into
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.nodes import DAY_MS, Nodes, StoreClock
from kvwarehouse.remote.object_store import ObjectStore
from kvwarehouse.remote.replaced import ReplacedObjects
from kvwarehouse.remote.store_gate import StoreProblem
from kvwarehouse.remote.totals import StoredTotals

NEXT_DAY_MS: Final = 60_000
"""So long before midnight the filter's days go on: a put of the new day may be told by a host whose
clock is ahead, or come here before a round does, and the filter takes none of days to come."""


class FleetSettings(Protocol):
    """What of a worker's settings (report.WorkerSettings) is the fleet's."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def ttl_days(self) -> int: ...


@dataclass(frozen=True)
class FleetFacts:
    """What is known of the fleet's store, for a report."""

    used_bytes: int
    objects: int
    """As of the last listing, and put here since."""
    nodes: int
    is_seen: bool
    """All others count this node, so it may put."""
    room_bytes: int
    """How much this node may still put before its next listing."""
    is_full: bool
    """The last object that it would have put had no room."""
    deleted_objects: int
    listed_ago_s: float
    """-1: not listed yet."""
    put_if_absent: bool | None
    """None: not probed yet."""
    clock_jump_s: float
    """Of the store's clock, while that is doubted; else 0."""


class FleetStore:
    """`node`: this one, 64 bits. `clock`: monotonic seconds."""

    def __init__(
        self,
        store: ObjectStore,
        names: FleetNames,
        sink: Sink,
        settings: FleetSettings,
        node: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._names, self._sink = store, names, sink
        self._clock = StoreClock(clock)
        self._nodes = Nodes(store, names, node, self._clock, clock)
        self._listing = Listing(store, names, sink, clock)
        self._deltas = Deltas(store, names, node, self._nodes, self._clock, clock)
        self._reader = DeltaReader(store, names, sink, node, self._nodes, clock)
        self._capacity = Capacity(settings.capacity_bytes, clock)
        self._janitor = Janitor(
            store, names, self._nodes, self._capacity, settings.ttl_days, self._removed
        )
        self._replaced = ReplacedObjects(store, clock)
        self._put_if_absent: bool | None = None
        self._filter_days: tuple[int, int] | None = None  # its newest, and today
        self._lock = threading.Lock()
        self._listed_objects = 0
        self._put_objects = 0  # since the last listing
        self._put_before_listing = 0  # of them, before the one that goes on

    @property
    def today(self) -> int | None:
        """Days since 1970 by the store's clock. None: it has not been asked yet."""
        return self._clock.today() if self._clock.is_known else None

    @property
    def now_ms(self) -> int | None:
        """Milliseconds since 1970 by the store's clock. None: it has not been asked yet."""
        return self._clock.now_ms() if self._clock.is_known else None

    def round(self) -> TransportError | None:
        """Does what is due. What failed last, if anything did."""
        failure = None
        steps = (
            self._nodes.round,
            self._new_day,
            self._probe,
            self._list,
            self._tell,
            self._reader.round,
            self._clean,
            self._drop_replaced,
        )
        for step in steps:
            if step != self._nodes.round and not self._clock.is_known:
                break
            try:
                step()
            except TransportError as error:
                failure = error
        return failure

    @property
    def problem(self) -> StoreProblem | None:
        """Why the store takes none of the small objects that tell the others of this node."""
        return self._nodes.gate.problem

    def admit(self, size_bytes: int) -> bool:
        """True: an object of so many bytes may be put now. It counts, whatever becomes of it."""
        return self._nodes.is_seen and self._capacity.admit(size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """An object that was admitted, and of which nothing was sent."""
        self._capacity.give_back(size_bytes)

    def stored(self, name: PagesName, size_bytes: int, earlier_day: int | None = None) -> None:
        """It was put, and is there. `earlier_day`: and of a day before, which it replaces."""
        if earlier_day is not None and earlier_day < name.day:
            self._replaced.add(self._names.pages(replace(name, day=earlier_day)))
        self._deltas.add(name, size_bytes)
        put_into(self._sink.put, [name])
        with self._lock:
            self._put_objects += 1

    def facts(self) -> FleetFacts:
        ago_s = self._listing.listed_ago_s
        with self._lock:
            objects = self._listed_objects + self._put_objects
        return FleetFacts(
            used_bytes=self._capacity.used_bytes,
            objects=objects,
            nodes=self._nodes.living,
            is_seen=self._nodes.is_seen,
            room_bytes=self._capacity.room_bytes if self._nodes.is_seen else 0,
            is_full=self._capacity.is_full,
            deleted_objects=self._janitor.deleted_objects + self._replaced.deleted,
            listed_ago_s=-1.0 if ago_s is None else ago_s,
            put_if_absent=self._put_if_absent,
            clock_jump_s=self._clock.jump_s,
        )

    def join_listing(self, timeout_s: float | None = None) -> bool:
        """True: no listing goes on."""
        return self._listing.join(timeout_s)

    def close(self) -> None:
        """Ends a listing that goes on; waits for nothing."""
        self._listing.close()

    def _new_day(self) -> None:
        now_ms = self._clock.now_ms()
        days = (now_ms + NEXT_DAY_MS) // DAY_MS, now_ms // DAY_MS
        if self._filter_days != days:
            self._filter_days = days
            self._sink.advance(*days)

    def _probe(self) -> None:
        if self._put_if_absent is None:
            with self._nodes.gate.call():
                self._put_if_absent = self._store.probe(self._names.probes_prefix).put_if_absent

    def _list(self) -> None:
        if self._listing.is_due:
            with self._lock:
                self._put_before_listing = self._put_objects
            self._listing.begin()
        totals = self._listing.end()
        if totals is not None:
            self._listed(totals)
        if self._nodes.is_seen:
            self._capacity.grant(self._nodes.living)

    def _listed(self, totals: StoredTotals) -> None:
        bytes_of_days = {day: total.bytes for day, total in totals.by_day().items()}
        self._capacity.listed(bytes_of_days, self._listing.began_s)
        with self._lock:
            self._put_objects -= self._put_before_listing
            self._listed_objects = totals.whole().objects

    def _tell(self) -> None:
        self._deltas.round()

    def _clean(self) -> None:
        if self._put_if_absent is not None:
            self._janitor.round(put_if_absent=self._put_if_absent)

    def _drop_replaced(self) -> None:
        if not self._clock.jump_s:  # nothing is deleted then
            self._replaced.round()

    def _removed(self, names: list[PagesName]) -> None:
        for name in names:
            self._sink.remove(name.key, name.epoch, name.day)
