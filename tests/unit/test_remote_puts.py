"""What becomes of runs that are to be put: over obstore's memory, with doubles of the filter, of
what packs, and of the fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvwarehouse.errors import TransportError
from kvwarehouse.rate_limit import RateLimit
from kvwarehouse.remote import damaged_objects, store_gate
from kvwarehouse.remote.damaged_objects import DamagedObjects
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import ObjectStore, StoreSettings, open_store
from kvwarehouse.remote.puts import PUT_RESULTS, Destination, Puts
from kvwarehouse.remote.store_gate import StoreGate, StoreProblem

FLEET, SPACE, KEY = bytes(range(16)), b"s" * 16, b"k" * 16
NAMES = FleetNames(FLEET)
TODAY = 20_000
DATA = b"an object of pages"
NAME = PagesName(SPACE, 0, TODAY, KEY)
OLD = PagesName(SPACE, 0, TODAY - 1, KEY)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Run:
    namespace_id: bytes = SPACE
    key: bytes = KEY
    epoch: int = 0
    day: int | None = None
    bytes: int = len(DATA)


class Packed(bytes):
    reason = ""


class Presence:
    """Of keys, the newest day."""

    def __init__(self) -> None:
        self.days: dict[bytes, int] = {}

    def put(self, keys: bytes, epochs: Any, days: Any) -> dict[str, int]:
        assert (epochs.dtype, days.dtype, len(keys)) == (np.uint64, np.uint32, 16)
        self.days[keys] = int(days[0])
        return {"added": 1}

    def remove(self, key: bytes, epoch: int, day: int) -> bool:
        return self.days.pop(key, None) == day

    def day_of(self, key: bytes, epoch: int) -> int | None:
        return self.days.get(key)


class Fleet:
    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self.today: int | None = TODAY
        self.room = True
        self.told: list[tuple[PagesName, int]] = []
        self.earlier_days: list[int | None] = []
        self.admitted = 0  # bytes that count

    def admit(self, size_bytes: int) -> bool:
        self.admitted += size_bytes if self.room else 0
        return self.room

    def give_back(self, size_bytes: int) -> None:
        self.admitted -= size_bytes

    def stored(self, name: PagesName, size_bytes: int, earlier_day: int | None) -> None:
        self.told.append((name, size_bytes))
        self.earlier_days.append(earlier_day)
        self.presence.days[name.key] = name.day


class Failing:
    """A store whose calls fail as they are told to: a code a call, or None for one that works."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.puts: list[str | None] = []
        self.copies: list[str | None] = []
        self.asked: list[tuple[str, bool]] = []

    def put(self, name: str, data: Any, *, if_absent: bool = False) -> bool:
        self.asked.append(("put", if_absent))
        self._fail(self.puts)
        return self._store.put(name, data, if_absent=if_absent)

    def copy(self, source: str, to: str) -> bool:
        self.asked.append(("copy", False))
        self._fail(self.copies)
        return self._store.copy(source, to)

    def _fail(self, codes: list[str | None]) -> None:
        code = codes.pop(0) if codes else None
        if code:
            raise TransportError("the text of it", code=code)


class Rig:
    def __init__(self, heeds_absent: bool = True) -> None:
        self.kept = open_store(StoreSettings("memory:///"))
        self.store = Failing(self.kept)
        self.presence, self.clock = Presence(), Clock()
        self.fleet = Fleet(self.presence)
        self.gate = StoreGate(self.clock)
        self.packed: list[Run] = []
        self.reason = ""
        self.slept: list[float] = []
        store: Any = self.store
        self.damaged = DamagedObjects()
        to = Destination(
            store, NAMES, self.fleet, self.presence, self.damaged, lambda: heeds_absent
        )
        rate = RateLimit(10, self.clock, self.slept.append)
        pack: Callable[[Any], Any] = self.pack
        self.puts = Puts(to, pack, self.gate, rate)

    def pack(self, run: Run) -> Packed:
        self.packed.append(run)
        packed = Packed(DATA)
        packed.reason = self.reason
        return packed

    def put(self, **fields: Any) -> str:
        run: Any = Run(**fields)
        result = self.puts.put(run)
        assert result in PUT_RESULTS
        return result

    def object(self, name: PagesName) -> bytes | None:
        found = self.kept.get(NAMES.pages(name), 0, 1000)
        return None if found is None else bytes(found)


def test_run_becomes_one_object_that_filter_and_fleet_hear_of() -> None:
    rig = Rig()
    assert rig.put() == "stored"
    assert rig.object(NAME) == DATA
    assert rig.presence.days == {KEY: TODAY}
    assert rig.fleet.told == [(NAME, len(DATA))]
    assert (rig.puts.results, rig.puts.put_bytes) == ({"stored": 1}, len(DATA))


def test_run_that_the_filter_has_of_today_is_not_put_again() -> None:
    rig = Rig()
    rig.put()
    assert rig.put() == "already"
    assert (len(rig.packed), len(rig.fleet.told)) == (1, 1)


def test_object_that_another_host_has_put_is_had_and_is_not_counted_twice() -> None:
    rig = Rig()
    rig.kept.put(NAMES.pages(NAME), DATA)
    assert rig.put() == "already"
    assert rig.presence.days == {KEY: TODAY}
    assert (rig.fleet.told, rig.puts.put_bytes) == ([], 0)


def test_store_that_ignores_put_if_absent_is_not_asked_for_it() -> None:
    rig = Rig(heeds_absent=False)
    rig.kept.put(NAMES.pages(NAME), b"another's")
    assert rig.put() == "stored"
    assert rig.store.asked == [("put", False)]
    assert rig.object(NAME) == DATA


@pytest.mark.parametrize(
    ("reason", "result"),
    [
        ("not_in_dram", "not_in_dram"),
        ("damaged", "damaged"),
        ("cleared", "cleared"),
        ("too_large", "too_large"),
        ("unknown_namespace", "failed"),
        ("a newer word", "failed"),
    ],
)
def test_run_whose_pages_are_not_to_be_had_is_not_put(reason: str, result: str) -> None:
    rig = Rig()
    rig.reason = reason
    assert rig.put() == result
    assert rig.object(NAME) is None
    assert (rig.presence.days, rig.fleet.told, rig.store.asked) == ({}, [], [])


def test_run_that_the_fleet_has_no_room_for_is_not_packed() -> None:
    rig = Rig()
    rig.fleet.room = False
    assert rig.put() == "no_room"
    assert rig.packed == []


def test_put_that_fails_is_tried_once_more_and_then_overwrites() -> None:
    rig = Rig()
    rig.store.puts = ["remote_failed"]
    assert rig.put() == "stored"
    assert rig.store.asked == [("put", True), ("put", False)]
    assert len(rig.packed) == 1


def test_put_that_fails_twice_leaves_nothing_and_the_next_one_is_put() -> None:
    rig = Rig()
    rig.store.puts = ["remote_failed", "remote_failed"]
    assert rig.put() == "failed"
    assert (rig.presence.days, rig.fleet.told, rig.puts.put_bytes) == ({}, [], 0)
    assert rig.gate.problem is None
    assert rig.put() == "stored"


@pytest.mark.parametrize("code", ["remote_off", "remote_refused", "remote_full"])
def test_put_that_a_second_try_does_not_help_is_tried_once(code: str) -> None:
    rig = Rig()
    rig.store.puts = [code]
    assert rig.put() == ("no_room" if code == "remote_full" else "failed")
    assert len(rig.store.asked) == 1


def test_object_of_an_earlier_day_is_copied_to_todays_name() -> None:
    rig = Rig()
    rig.kept.put(NAMES.pages(OLD), DATA)
    rig.presence.days = {KEY: OLD.day}
    assert rig.put(day=OLD.day) == "refreshed"
    assert rig.object(NAME) == DATA
    assert rig.packed == []
    assert rig.presence.days == {KEY: TODAY}
    assert rig.fleet.told == [(NAME, len(DATA))]
    assert rig.fleet.earlier_days == [OLD.day]
    assert rig.puts.put_bytes == 0


def test_object_that_is_not_where_the_filter_says_is_put() -> None:
    rig = Rig()
    rig.presence.days = {KEY: OLD.day}
    rig.reason = "not_in_dram"
    assert rig.put(day=OLD.day) == "not_in_dram"
    assert rig.presence.days == {}
    rig.reason = ""
    assert rig.put(day=OLD.day) == "stored"


def test_store_that_cannot_copy_is_asked_for_it_a_few_times() -> None:
    rig = Rig()
    rig.store.copies = ["remote_failed"] * 10
    for _ in range(5):
        rig.presence.days = {}
        assert rig.put(day=OLD.day) in ("stored", "already")
    assert rig.store.asked.count(("copy", False)) == 3
    assert len(rig.packed) == 5
    assert rig.fleet.earlier_days == [OLD.day]  # the others were there


def test_copies_that_fail_with_the_whole_store_are_tried_again() -> None:
    rig = Rig()
    rig.store.copies = ["remote_failed"] * 4
    rig.store.puts = ["remote_failed"] * 8
    for _ in range(4):
        assert rig.put(day=OLD.day) == "failed"
    rig.kept.put(NAMES.pages(OLD), DATA)
    assert rig.put(day=OLD.day) == "refreshed"


def test_object_that_was_found_damaged_is_put_over_once() -> None:
    """Incident: the put asked for none to be there. The damaged one was, so it stayed, and was
    promised again."""
    rig = Rig()
    rig.kept.put(NAMES.pages(NAME), b"flipped")
    rig.presence.days = {KEY: TODAY}  # a listing says so
    rig.damaged.add(KEY, 0)
    assert rig.put() == "stored"
    assert rig.object(NAME) == DATA
    assert rig.store.asked == [("put", False)]
    assert rig.put() == "already"


def test_object_that_was_found_damaged_is_not_copied_to_todays_name() -> None:
    """Incident: it was, day after day, for as long as anybody used it."""
    rig = Rig()
    for name in (OLD, NAME):  # another host has copied it
        rig.kept.put(NAMES.pages(name), b"flipped")
    rig.damaged.add(KEY, 0)
    assert rig.put(day=OLD.day) == "stored"
    assert rig.object(NAME) == DATA
    assert rig.store.asked == [("put", False)]
    assert rig.fleet.earlier_days == [OLD.day]
    rig.fleet.today = TODAY + 1
    assert rig.put(day=TODAY) == "refreshed"
    assert rig.object(replace(NAME, day=TODAY + 1)) == DATA


def test_object_that_was_found_damaged_stays_so_until_it_is_put() -> None:
    rig = Rig()
    rig.damaged.add(KEY, 0)
    rig.store.puts = ["remote_refused"]
    assert rig.put() == "failed"
    assert rig.damaged.has(KEY, 0)
    assert not rig.damaged.has(KEY, 1)


def test_objects_that_were_found_damaged_are_bounded_and_the_oldest_go_first() -> None:
    damaged = DamagedObjects()
    keys = [number.to_bytes(16, "little") for number in range(damaged_objects.KEPT_MAX)]
    for key in keys:
        damaged.add(key, 0)
    damaged.add(keys[0], 0)  # again: it is the latest
    damaged.add(KEY, 0)
    assert [damaged.has(key, 0) for key in (keys[0], keys[1], keys[2], KEY)] == [
        True, False, True, True,
    ]  # fmt: skip


def test_bytes_a_second_are_bounded_before_anything_is_packed() -> None:
    rig = Rig()
    rig.reason = "not_in_dram"
    rig.put()
    rig.put()
    assert rig.slept == [pytest.approx(1.8), pytest.approx(3.6)]


def test_what_packing_raises_goes_on() -> None:
    rig = Rig()

    def gone(run: object) -> None:
        raise TransportError("the daemon is gone", code="closed")

    rig.puts._pack = gone
    with pytest.raises(TransportError, match="daemon is gone"):
        rig.put()
    assert rig.puts.results == {}


# --- the gate


def refusal(code: str = "remote_refused") -> TransportError:
    return TransportError("the text of it", code=code)


@pytest.mark.parametrize("code", store_gate.CLOSING_CODES)
def test_gate_closes_for_all_but_one_put_now_and_then(code: str) -> None:
    clock = Clock()
    gate = StoreGate(clock)
    assert gate.admit()
    gate.failed(refusal(code))
    assert gate.problem == StoreProblem(code, "the text of it")
    for _ in range(3):
        assert not gate.admit()
        clock.now_s += store_gate.PROBE_EVERY_S
        assert gate.admit()
        assert not gate.admit()
        gate.failed(refusal(code))
    clock.now_s += store_gate.PROBE_EVERY_S
    assert gate.admit()
    gate.succeeded()
    assert gate.problem is None
    assert gate.admit()


@pytest.mark.parametrize("code", ["remote_failed", "remote_off"])
def test_gate_leaves_other_failures_to_the_breaker(code: str) -> None:
    gate = StoreGate(Clock())
    gate.failed(refusal(code))
    assert gate.admit()
    assert gate.problem is None


@pytest.mark.parametrize(
    ("code", "result"), [("remote_refused", "failed"), ("remote_full", "no_room")]
)
def test_put_that_is_refused_closes_the_gate_and_one_that_is_stored_opens_it(
    code: str, result: str
) -> None:
    rig = Rig()
    rig.store.puts = [code]
    assert [rig.put() for _ in range(3)] == [result] * 3
    assert (len(rig.packed), rig.gate.problem is None) == (1, False)
    rig.clock.now_s += store_gate.PROBE_EVERY_S
    assert rig.put() == "stored"
    assert rig.gate.problem is None


def test_run_is_not_put_before_the_store_has_said_which_day_it_is() -> None:
    rig = Rig()
    rig.fleet.today = None
    assert rig.put() == "failed"
    assert rig.store.asked == []


@pytest.mark.parametrize("reason", ["not_in_dram", "damaged", "cleared"])
def test_run_of_which_nothing_was_sent_takes_no_capacity(reason: str) -> None:
    """Incident: runs whose pages had left used up what the host might put, counted as used, and
    made the janitor delete a day for room."""
    rig = Rig()
    rig.reason = reason
    assert rig.put() == reason
    assert rig.fleet.admitted == 0


def test_object_of_another_host_takes_no_capacity_of_this_one() -> None:
    rig = Rig()
    rig.put()
    used = rig.fleet.admitted
    rig.presence.days.clear()
    assert rig.put() == "already"
    assert rig.fleet.admitted == used > 0


def test_put_that_failed_keeps_its_capacity() -> None:
    """Nobody knows what is there."""
    rig = Rig()
    rig.store.puts = ["remote_failed", "remote_failed"]
    assert rig.put() == "failed"
    assert rig.fleet.admitted > 0
