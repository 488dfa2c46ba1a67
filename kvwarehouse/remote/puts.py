"""What becomes of a run that the daemon would have in the store: a copy of yesterday's object under
today's name, or its pages, packed and put. An object that was found damaged here is neither copied
nor left as it is: its pages are put over it. Each run ends with one of PUT_RESULTS.

Thread-safe: a put thread holds one object, from packing to the end of its put. A put that fails
leaves nothing behind and is not remembered: the run comes again when it is used again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvwarehouse.errors import TransportError
from kvwarehouse.rate_limit import RateLimit
from kvwarehouse.remote.damaged_objects import DamagedObjects
from kvwarehouse.remote.listing import put_into
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import ObjectStore
from kvwarehouse.remote.store_gate import StoreGate

if TYPE_CHECKING:
    from kvwarehouse.core import RunToPut

PUT_RESULTS: Final = (
    "stored",
    "refreshed",
    "already",
    "failed",
    "not_in_dram",
    "damaged",
    "cleared",
    "no_room",
    "too_large",
)

_COPIES_THAT_FAIL: Final = 3
"""In a row, each where a put of the same object went well: the store cannot copy."""


class Fleet(Protocol):
    """What a put has to know of the other hosts, and they of it (fleet_store.FleetStore)."""

    @property
    def today(self) -> int | None: ...
    def admit(self, size_bytes: int) -> bool: ...
    def give_back(self, size_bytes: int) -> None: ...
    def stored(self, name: PagesName, size_bytes: int, earlier_day: int | None) -> None: ...


class Presence(Protocol):
    """What the store has, as far as this host knows (core.PresenceFile)."""

    def put(self, keys: bytes, epochs: Any, days: Any) -> Any: ...
    def remove(self, key: bytes, epoch: int, day: int) -> bool: ...
    def day_of(self, key: bytes, epoch: int) -> int | None: ...


@dataclass(frozen=True)
class Destination:
    """Where objects go, and who hears of them. `heeds_absent` says whether the store was seen to
    refuse a second put of a name where that is asked for."""

    store: ObjectStore
    names: FleetNames
    fleet: Fleet
    presence: Presence
    damaged: DamagedObjects
    heeds_absent: Callable[[], bool]


class Puts:
    """`pack` makes the object of a run: a buffer with a `reason`, "" where it is whole."""

    def __init__(
        self, to: Destination, pack: Callable[[RunToPut], Any], gate: StoreGate, rate: RateLimit
    ) -> None:
        self._to, self._pack, self._gate, self._rate = to, pack, gate, rate
        self._turns = threading.Lock()  # of the rate
        self._lock = threading.Lock()
        self._results: Counter[str] = Counter()
        self._put_bytes = 0
        self._copies_failed = 0

    @property
    def results(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._results)

    @property
    def put_bytes(self) -> int:
        with self._lock:
            return self._put_bytes

    def put(self, run: RunToPut) -> str:
        """How it ended. Raises what packing raises: the daemon is gone, or worse."""
        result = self._result(run)
        with self._lock:
            self._results[result] += 1
        return result

    def _result(self, run: RunToPut) -> str:
        to = self._to
        day = to.fleet.today
        if day is None:
            return "failed"  # it has no name yet
        name = PagesName(run.namespace_id, run.epoch, day, run.key)
        heals = to.damaged.has(run.key, run.epoch)
        if not heals and to.presence.day_of(run.key, run.epoch) == name.day:
            return "already"
        if not self._gate.admit():
            return self._gate_result()
        if not to.fleet.admit(run.bytes):
            return "no_room"
        try:
            if not heals and self._copied(run, name):
                return "refreshed"
        except TransportError as error:
            return self._failed(error)
        packed = self._packed(run)
        if isinstance(packed, str):
            to.fleet.give_back(run.bytes)
            return packed
        try:
            return self._put(name, packed, run, if_absent=not heals and to.heeds_absent())
        except TransportError as error:
            self._copies_failed = 0  # it is the store, and not that it cannot copy
            return self._failed(error)

    def _failed(self, error: TransportError) -> str:
        self._gate.failed(error)
        return _result_of(error.code)

    def _gate_result(self) -> str:
        problem = self._gate.problem
        return _result_of(problem.code if problem else "")

    # --- a copy within the store

    def _copied(self, run: RunToPut, name: PagesName) -> bool:
        if run.day is None or self._copies_failed >= _COPIES_THAT_FAIL:
            return False
        to = self._to
        source = replace(name, day=run.day)
        try:
            copied = to.store.copy(to.names.pages(source), to.names.pages(name))
        except TransportError as error:
            if error.code != "remote_failed":
                raise
            self._copies_failed += 1
            return False
        self._copies_failed = 0
        if copied:
            self._stored(name, run)
        else:
            to.presence.remove(run.key, run.epoch, run.day)
        return copied

    # --- a put

    def _packed(self, run: RunToPut) -> Any:
        """The object; or how the run ends, where there is none."""
        with self._turns:
            self._rate.spend(run.bytes)
        packed = self._pack(run)
        if packed.reason:
            return packed.reason if packed.reason in PUT_RESULTS else "failed"
        return packed

    def _put(self, name: PagesName, data: Any, run: RunToPut, *, if_absent: bool) -> str:
        if not self._put_twice(self._to.names.pages(name), data, if_absent=if_absent):
            self._gate.succeeded()
            put_into(self._to.presence.put, [name])
            self._to.fleet.give_back(run.bytes)
            return "already"  # another host has put it, and counts it
        self._stored(name, run)
        self._to.damaged.healed(run.key, run.epoch)
        with self._lock:
            self._put_bytes += run.bytes
        return "stored"

    def _put_twice(self, path: str, data: Any, *, if_absent: bool) -> bool:
        """False: it was there. The second try overwrites: nobody knows whether the first has left
        something."""
        store = self._to.store
        try:
            return store.put(path, data, if_absent=if_absent)
        except TransportError as error:
            if error.code != "remote_failed":
                raise
        return store.put(path, data)

    def _stored(self, name: PagesName, run: RunToPut) -> None:
        self._gate.succeeded()
        self._to.fleet.stored(name, run.bytes, run.day)


def _result_of(code: str) -> str:
    return "no_room" if code == "remote_full" else "failed"
