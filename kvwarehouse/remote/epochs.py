"""Clears of a fleet: which epoch each namespace has in the store, and markers of this host's own.

A namespace's epoch is the highest number among its markers, `v1/FLEET/epoch/NAMESPACE/EPOCH`
(names.py), and among those of EVERYTHING, which are of all namespaces; 0 without one. Markers are
written once and never changed. A clear is done for all hosts once its marker was listed as the
highest: whoever clears beside it, and is done sooner, has listed before this marker was there, and
whoever is done later writes above it. So it is

    list       what is there already was cleared before, and the daemon may not know of it yet
    write      a marker above all of it
    list       a marker that is higher by now may be of a clear that does not know of this one:
               write again, above it. One that came in between, below, is told to the daemon.
               While ours is not listed, list again: a store may list late, and each marker more
               clears all hosts once more

A listing is believed where it has the sentinel, an object that hosts keep behind all markers: an
answer that is none, such as a proxy's page of HTML, looks like a listing that is empty, or that
ends early.

An epoch of another host is taken from a listing alone: where its marker is not there any more
(a rule of the store's by age, an emptied bucket) it is written again by whoever knows it.

`fresh_until_s` is how long a host may serve from the store: what was listed lately is all that was
cleared, and the daemon has acted upon it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvwarehouse.errors import TransportError
from kvwarehouse.remote.names import EVERYTHING, FleetNames
from kvwarehouse.remote.nodes import DAY_MS
from kvwarehouse.remote.object_store import ObjectStore
from kvwarehouse.remote.report import (
    EPOCHS_END,
    EPOCHS_PER_LINE,
    ClearTold,
    ClearWritten,
    EpochsFound,
    EpochsKnown,
    FromWorker,
    ToWorker,
)

LIST_EVERY_S: Final = 5.0
RETRY_S: Final = 1.0
"""After a listing that failed. A clear that stays owed is tried again after as long, doubling to
LIST_EVERY_S."""
LOST_AFTER_S: Final = 120.0
"""A marker that no listing has for so long, doubling, is put again, under its name."""
FRESH_S: Final = 10.0
"""A core serves nothing that long after the listing, whatever has stopped on its host meanwhile
(remote/get_link.h). What was under way then has 5 s more: so 15 s after a clear no host serves what
is older."""

MARKERS_MAX: Final = 1 << 18
NAMESPACES_MAX: Final = 1 << 16
"""That were cleared after all were. A fleet that has more cannot be listed every few seconds."""
SPARE: Final = 1 << 10
"""Of these, what is left for hosts that write at the same time, and for a clear of all, which makes
the others unnecessary. No marker of a namespace more is begun in it."""

SUPERSEDED_MS: Final = DAY_MS
"""How long a marker stays that is below another: who writes one has to see what came between."""
OLDER_OBJECTS_MS: Final = 3600 * 1000
"""How long objects of older epochs stay."""

_AT_ONCE: Final = 64
_BITS_OF_NODE: Final = 16


@dataclass(frozen=True, slots=True)
class Marker:
    epoch: int
    name: str
    modified_s: float
    """By the store's clock, seconds since 1970."""


@dataclass(slots=True)
class _OwedClear:
    """A clear that the daemon has told of, and how far it is. `tell` makes it, and the thread of
    `round` changes it."""

    clear_epoch: int
    due_s: float
    above: int = 0
    """What was tried: a put whose answer was lost may have left it there."""
    pause_s: float = RETRY_S
    """After the next try."""
    marker: int = 0
    """The epoch of its own that was put, until a higher one is listed; 0: none."""
    put_s: float = 0.0
    lost_after_s: float = LOST_AFTER_S

    def pause(self, now_s: float) -> None:
        self.due_s, self.pause_s = now_s + self.pause_s, min(2 * self.pause_s, LIST_EVERY_S)


Markers = Mapping[bytes, Sequence[Marker]]
"""By namespace; each has one at least, the highest epoch last."""


def list_markers(store: ObjectStore, names: FleetNames) -> Markers:
    """Raises TransportError, also where there are over MARKERS_MAX."""
    return _list(store, names)[0]


def _list(store: ObjectStore, names: FleetNames) -> tuple[Markers, bool]:
    """Also whether the sentinel is there."""
    found: dict[bytes, list[Marker]] = {}
    count, is_whole = 0, False
    for item in store.list(names.epochs_prefix):
        is_whole = is_whole or item.name == names.epochs_sentinel
        of = names.epoch_of(item.name)
        if of is None or of[1] >= EPOCHS_END:
            continue  # none, whoever has written it
        count += 1
        found.setdefault(of[0], []).append(Marker(of[1], item.name, item.modified_s))
        if count > MARKERS_MAX:
            raise TransportError(
                f"the store has over {MARKERS_MAX} markers of clears, so nothing is read from it; "
                "the janitor deletes those that a later one has made unnecessary, a day later. Use "
                f"another --fleet-secret, or delete those below {names.epochs_prefix} that no host "
                "uses any more",
                code="remote_failed",
            )
    for markers in found.values():
        markers.sort(key=lambda marker: marker.epoch)
    return found, is_whole


class Epochs:
    """`node`: this one's number. `say`: to the daemon; it waits for it. One thread calls `round`,
    any the rest. `clock`: monotonic seconds, of CLOCK_BOOTTIME where the core is to believe
    fresh_until_s."""

    def __init__(
        self,
        names: FleetNames,
        node: int,
        say: Callable[[FromWorker], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names, self._say, self._clock = names, say, clock
        self._low_bits = node & ((1 << _BITS_OF_NODE) - 1)
        self._told = threading.Event()
        self._lock = threading.Lock()
        self._owed: dict[bytes, _OwedClear] = {}
        self._known: dict[bytes, int] = {}
        self._said: dict[bytes, int] = {}
        self._serial = self._heard = 0
        self._listed_s: float | None = None  # when the last listing began that was told
        self._due_s = clock()

    @property
    def is_fresh(self) -> bool:
        return self._clock() < self.fresh_until_s

    @property
    def fresh_until_s(self) -> float:
        """By its clock; 0.0: it is not, since there is something that the daemon does not know."""
        listed_s = self._listed_s  # before the rest: a later listing may have something new
        with self._lock:
            told = self._serial > 0 and self._heard == self._serial
        return listed_s + FRESH_S if told and listed_s is not None else 0.0

    @property
    def listed_ago_s(self) -> float | None:
        """None: not listed yet."""
        listed_s = self._listed_s
        return None if listed_s is None else self._clock() - listed_s

    @property
    def owed(self) -> int:
        """Clears that it was told of and whose markers are not there yet."""
        with self._lock:
            return len(self._owed)

    def tell(self, told: ToWorker) -> None:
        """What the daemon says."""
        with self._lock:
            if isinstance(told, ClearTold):
                self._owe(bytes.fromhex(told.namespace), told.clear_epoch)
            elif isinstance(told, EpochsKnown):
                self._learn((bytes.fromhex(name), epoch) for name, epoch in told.epochs.items())
            else:
                self._heard = told.serial
        if isinstance(told, ClearTold):
            self._told.set()

    def wait(self, timeout_s: float) -> None:
        """Until there is a clear to write, at most that long."""
        self._told.wait(timeout_s)
        self._told.clear()

    def round(self, store: ObjectStore, now_ms: int | None, *, put_if_absent: bool) -> None:
        """Does what is due. `now_ms`: by the store's clock, None before it is known. Raises
        TransportError; what was not done then is due again."""
        due = self._take_due()
        if not due and self._clock() < self._due_s:
            return
        begun_s = self._clock()
        listed = self._list(store)
        try:
            has_put = self._put(store, now_ms or 0, due, put_if_absent=put_if_absent)
        except TransportError:
            self._settle(listed)
            self._tell(begun_s)  # others have cleared too, whatever becomes of ours
            raise
        if has_put:
            begun_s = self._clock()
            listed = self._list(store)
        self._settle(listed)
        self._tell(begun_s)
        self._restore(store, listed)

    def _owe(self, namespace: bytes, clear_epoch: int) -> None:
        before = self._owed.get(namespace)
        if namespace == EVERYTHING:  # one marker for all that is owed
            self._owed.clear()
        above = before.above if before else 0
        self._owed[namespace] = _OwedClear(clear_epoch, self._clock(), above)

    # --- the thread of round()

    def _list(self, store: ObjectStore) -> Markers:
        begun_s = self._clock()
        self._due_s = begun_s + RETRY_S  # unless it goes through
        found, is_whole = _list(store, self._names)
        if not is_whole:  # a new fleet, a rule of the store's by age; or no listing
            store.put(self._names.epochs_sentinel, b"-")
            found, is_whole = _list(store, self._names)
        if not is_whole:
            raise TransportError(
                f"the store does not list {self._names.epochs_sentinel}, which was put there: its "
                "listings are not believed. See whether something else answers in its place, such "
                "as a proxy",
                code="remote_failed",
            )
        with self._lock:
            self._learn((namespace, markers[-1].epoch) for namespace, markers in found.items())
        self._due_s = begun_s + LIST_EVERY_S
        return found

    def _take_due(self) -> Mapping[bytes, _OwedClear]:
        """What is to be tried now; each has its next try, should this one come to nothing."""
        now_s = self._clock()
        with self._lock:
            due = {name: owed for name, owed in self._owed.items() if owed.due_s <= now_s}
        for owed in due.values():
            owed.pause(now_s)
        return due

    def _put(
        self,
        store: ObjectStore,
        now_ms: int,
        due: Mapping[bytes, _OwedClear],
        *,
        put_if_absent: bool,
    ) -> bool:
        """True: markers were put, so a later listing may have them."""
        known, puts = self._copy_of_known(), 0
        with self._lock:
            places = known.keys() | {name for name, owed in self._owed.items() if owed.marker}
        for namespace, owed in due.items():
            if puts == _AT_ONCE:
                owed.due_s = self._clock()
            elif owed.marker:
                puts += self._put_lost(store, namespace, owed)
            else:
                # There may be no room before all is cleared; and nothing is above the highest
                # number, which only a stranger can have taken.
                is_full = namespace not in places and len(places) >= NAMESPACES_MAX - SPARE
                epoch = self._above(now_ms, max(owed.above, _top(known, namespace)))
                if epoch >= EPOCHS_END or (is_full and namespace != EVERYTHING):
                    continue
                owed.above = epoch
                # One that is there by now is of a host that has chosen the same number meanwhile.
                name = self._names.epoch(namespace, epoch)
                if store.put(name, b"-", if_absent=put_if_absent):
                    owed.marker, owed.put_s = epoch, self._clock()
                    places.add(namespace)
                puts += 1
        return puts > 0

    def _put_lost(self, store: ObjectStore, namespace: bytes, owed: _OwedClear) -> int:
        """A marker that no listing has for so long; how many were put."""
        now_s = self._clock()
        if now_s < owed.put_s + owed.lost_after_s:
            return 0
        owed.put_s, owed.lost_after_s = now_s, 2 * owed.lost_after_s
        store.put(self._names.epoch(namespace, owed.marker), b"-")
        return 1

    def _settle(self, listed: Markers) -> None:
        """What is done is said; what another marker is above is due again."""
        with self._lock:
            put = {name: owed for name, owed in self._owed.items() if owed.marker}
        for namespace, owed in put.items():
            seen = _epochs_of(listed, namespace)
            highest = max(seen, default=0)
            if highest > owed.marker:
                owed.marker, owed.due_s = 0, self._clock()
            elif highest == owed.marker:
                below = max((each for each in seen if each < highest), default=0)
                self._say(ClearWritten(namespace.hex(), highest, owed.clear_epoch, below))
                self._strike(namespace, owed)

    def _above(self, now_ms: int, top: int) -> int:
        """A number above `top` that no other host chooses at this time, as far as can be."""
        later_ms = max(now_ms, (top >> _BITS_OF_NODE) + 1)
        return later_ms << _BITS_OF_NODE | self._low_bits

    def _restore(self, store: ObjectStore, listed: Markers) -> None:
        of_all = _highest(listed, EVERYTHING)
        gone = [
            (namespace, epoch)
            for namespace, epoch in self._copy_of_known().items()
            if epoch > max(of_all, _highest(listed, namespace))
        ]
        for namespace, epoch in gone[:_AT_ONCE]:
            store.put(self._names.epoch(namespace, epoch), b"-")

    def _tell(self, begun_s: float) -> None:
        """The daemon, what a listing that began then has changed. Raises TransportError where it is
        more than a daemon knows; a clear of all is written all the same, and mends it."""
        known = self._copy_of_known()
        if len(known) > NAMESPACES_MAX:
            raise TransportError(
                f"the fleet has cleared over {NAMESPACES_MAX} namespaces, so nothing is read from "
                "the store; clear --all makes the markers of each unnecessary",
                code="remote_failed",
            )
        changed = {
            namespace.hex(): epoch
            for namespace, epoch in known.items()
            if self._said.get(namespace, 0) != epoch
        }
        if changed or not self._serial:
            with self._lock:
                self._serial += 1  # nothing is fresh until the daemon has said it back
            # That of all comes first: the daemon forgets what is below before it counts the others.
            for line in _lines(self._serial, dict(sorted(changed.items()))):
                self._say(line)
            self._said.update((bytes.fromhex(name), epoch) for name, epoch in changed.items())
        self._listed_s = begun_s

    def _strike(self, namespace: bytes, done: _OwedClear) -> None:
        with self._lock:
            if self._owed.get(namespace) is done:  # or it was cleared again meanwhile
                del self._owed[namespace]

    def _copy_of_known(self) -> dict[bytes, int]:
        with self._lock:
            return dict(self._known)

    def _learn(self, epochs: Iterable[tuple[bytes, int]]) -> None:
        for namespace, epoch in epochs:
            self._known[namespace] = max(epoch, self._known.get(namespace, 0))
        of_all = self._known.get(EVERYTHING, 0)
        self._known = {
            namespace: epoch
            for namespace, epoch in self._known.items()
            if epoch > of_all or namespace == EVERYTHING
        }


def _top(epochs: Mapping[bytes, int], namespace: bytes) -> int:
    """What a marker of that namespace has to be above."""
    if namespace == EVERYTHING:
        return max(epochs.values(), default=0)
    return max(epochs.get(namespace, 0), epochs.get(EVERYTHING, 0))


def _epochs_of(markers: Markers, namespace: bytes) -> set[int]:
    """Those that are of a namespace; of any, for EVERYTHING."""
    of = markers if namespace == EVERYTHING else (namespace, EVERYTHING)
    return {marker.epoch for each in of for marker in markers.get(each, ())}


def _highest(markers: Markers, namespace: bytes) -> int:
    """Of its own ones."""
    return markers[namespace][-1].epoch if namespace in markers else 0


def _lines(serial: int, epochs: Mapping[str, int]) -> Iterator[EpochsFound]:
    items = list(epochs.items())
    parts = [items[at : at + EPOCHS_PER_LINE] for at in range(0, len(items), EPOCHS_PER_LINE)]
    for number, part in enumerate(parts or [[]], 1):
        yield EpochsFound(serial, max(len(parts), 1) - number, dict(part))


# --- what the janitor does with them


def superseded(markers: Markers, now_ms: int) -> list[str]:
    """Names of those that may go."""
    until_s, of_all = (now_ms - SUPERSEDED_MS) / 1000, _highest(markers, EVERYTHING)
    return [
        marker.name
        for each in markers.values()
        for marker in each
        if marker.epoch < max(each[-1].epoch, of_all) and marker.modified_s < until_s
    ]


def aged(markers: Markers, now_ms: int, ttl_days: int) -> list[str]:
    """Names of those that are to be written again, before a rule of the store's by age
    (lifecycle.py) takes them: what they clear may be on a host that is away for longer."""
    until_s, of_all = (now_ms - ttl_days * DAY_MS // 2) / 1000, _highest(markers, EVERYTHING)
    return [
        each[-1].name
        for each in markers.values()
        if each[-1].epoch >= of_all and each[-1].modified_s < until_s
    ]


def older_epochs(markers: Markers, now_ms: int) -> Callable[[bytes, int], bool]:
    """Whether objects of a namespace and an epoch may go: it was cleared, and long enough ago."""
    until = (now_ms - OLDER_OBJECTS_MS) << _BITS_OF_NODE
    ends = {
        namespace: max((marker.epoch for marker in each if marker.epoch < until), default=0)
        for namespace, each in markers.items()
    }
    return lambda namespace, epoch: epoch < _top(ends, namespace)
