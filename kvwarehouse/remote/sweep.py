"""What is deleted from a fleet's store, and the deleting, a step at a time.

Deleted are days that are over, the oldest days where the store is nearly full, what was cleared,
deltas that listings have by now, and what nodes and turns have left behind. What has no name of
this fleet's (names.py) is never touched, whoever put it. Two sweeps at a time delete the same
objects, which is no harm. The highest marker of a namespace that was cleared stays, and is written
again when it is old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvwarehouse.errors import TransportError
from kvwarehouse.remote import epochs
from kvwarehouse.remote.names import FleetNames, PagesName, PagesPrefix
from kvwarehouse.remote.nodes import DAY_MS
from kvwarehouse.remote.object_store import ObjectStore, StoredObject

TURN_MS: Final = 600_000
NEARLY_FULL: Final = 0.95
DELTA_MS: Final = 2 * 3600 * 1000
LEFT_MS: Final = 3600 * 1000
"""Turns of the janitor that are over for so long go, and probes of so long ago."""
BATCH: Final = 1000


def days_over(days: Iterable[int], today: int, ttl_days: int) -> set[int]:
    return {day for day in days if day < today - ttl_days}


def days_too_many(
    bytes_of_days: Mapping[int, int], today: int, ttl_days: int, capacity_bytes: int
) -> set[int]:
    """The oldest days, until the rest fits below NEARLY_FULL. Today stays: it is what is hot, and
    where it is all that there is, nothing more is put."""
    over = days_over(bytes_of_days, today, ttl_days)
    left = {day: size_bytes for day, size_bytes in bytes_of_days.items() if day not in over}
    most = int(NEARLY_FULL * capacity_bytes)
    gone: set[int] = set()
    for day in sorted(day for day in left if day < today):
        if sum(left.values()) <= most:
            break
        del left[day]
        gone.add(day)
    return gone


@dataclass
class Swept:
    """Objects by what they were, and the bytes of those of pages."""

    objects: Counter[str] = field(default_factory=Counter)
    pages_bytes: int = 0


@dataclass(frozen=True)
class SweepRules:
    now_ms: int
    """By the store's clock, at the beginning."""
    ttl_days: int
    too_many: Collection[int] = ()
    """Days that go though they are not over."""
    dry: bool = False
    """Counts, and deletes nothing."""


class Sweep:
    """`removed`: is told which pages were deleted. Not thread-safe."""

    def __init__(
        self,
        store: ObjectStore,
        names: FleetNames,
        rules: SweepRules,
        removed: Callable[[list[PagesName]], None] = lambda names: None,
    ) -> None:
        self._store, self._names, self._rules, self._removed = store, names, rules, removed
        self._now_ms = rules.now_ms
        self._is_older_epoch: Callable[[bytes, int], bool] = lambda namespace, epoch: False
        self.swept = Swept()

    def steps(self) -> Iterator[None]:
        """Each is a few calls to the store. Raises TransportError where one fails that lists or
        deletes; what is deleted then is counted, and another sweep does the rest."""
        yield from self._tend_markers()
        for prefix in self._doomed():
            yield from self._sweep_day(prefix)
            yield
        yield from self._sweep(self._names.deltas_prefix, "deltas", self._is_old_delta)
        yield from self._sweep(self._names.nodes_prefix, "nodes", self._is_dead_node)
        yield from self._sweep(self._names.turns_prefix, "turns", self._is_old_turn)
        yield from self._sweep(self._names.probes_prefix, "probes", self._is_old_probe)

    def _doomed(self) -> Iterator[str]:
        """Prefixes of days."""
        waiting = [self._names.root]
        while waiting:
            prefix = waiting.pop()
            of = self._names.pages_prefix_of(prefix)
            if of is None:
                continue
            if of.day is None:
                waiting.extend(self._store.parts(prefix))
            elif self._is_doomed(of.day) or self._is_cleared(of):
                yield prefix

    def _tend_markers(self) -> Iterator[None]:
        markers = epochs.list_markers(self._store, self._names)
        self._is_older_epoch = epochs.older_epochs(markers, self._now_ms)
        yield
        names = epochs.superseded(markers, self._now_ms)
        for at in range(0, len(names), BATCH):
            self._delete("markers", names[at : at + BATCH])
            yield
        for name in epochs.aged(markers, self._now_ms, self._rules.ttl_days):
            try:
                if not self._rules.dry:
                    self._store.put(name, b"-")
            except TransportError:
                break  # a store that is full is to be emptied; the next sweep writes it
            yield

    def _is_cleared(self, of: PagesPrefix) -> bool:
        assert of.namespace is not None
        assert of.epoch is not None
        return self._is_older_epoch(of.namespace, of.epoch)

    def _is_doomed(self, day: int) -> bool:
        today = self._now_ms // DAY_MS
        return day in self._rules.too_many or bool(days_over([day], today, self._rules.ttl_days))

    def _sweep_day(self, prefix: str) -> Iterator[None]:
        batch: list[tuple[StoredObject, PagesName]] = []
        for item in self._store.list(prefix):
            name = self._names.pages_of(item.name)
            if name is not None:
                batch.append((item, name))
            if len(batch) == BATCH:
                self._delete_pages(batch)
                batch = []
                yield
        self._delete_pages(batch)

    def _delete_pages(self, batch: list[tuple[StoredObject, PagesName]]) -> None:
        self._delete("pages", [item.name for item, _ in batch])
        self.swept.pages_bytes += sum(item.size_bytes for item, _ in batch)
        if not self._rules.dry:
            self._removed([name for _, name in batch])

    def _sweep(
        self, prefix: str, what: str, is_old: Callable[[StoredObject], bool]
    ) -> Iterator[None]:
        batch: list[str] = []
        for item in self._store.list(prefix):
            if is_old(item):
                batch.append(item.name)
            if len(batch) == BATCH:
                self._delete(what, batch)
                batch = []
                yield
        self._delete(what, batch)
        yield

    def _delete(self, what: str, names: list[str]) -> None:
        if not names:
            return
        if not self._rules.dry:
            self._store.delete(names)
        self.swept.objects[what] += len(names)

    def _is_old_delta(self, item: StoredObject) -> bool:
        delta = self._names.delta_of(item.name)
        return delta is not None and delta[0] < self._now_ms - DELTA_MS

    def _is_dead_node(self, item: StoredObject) -> bool:
        return self._names.node_of(item.name) is not None and self._is_older(item, DAY_MS)

    def _is_old_turn(self, item: StoredObject) -> bool:
        turn = self._names.turn_of(item.name)
        return turn is not None and turn * TURN_MS < self._now_ms - LEFT_MS

    def _is_old_probe(self, item: StoredObject) -> bool:
        return self._names.probe_of(item.name) is not None and self._is_older(item, LEFT_MS)

    def _is_older(self, item: StoredObject, age_ms: int) -> bool:
        return item.modified_s * 1000 < self._now_ms - age_ms
