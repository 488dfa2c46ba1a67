"""What becomes of runs that clients wait for: over obstore's memory, with doubles of the filter and
of what fills."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvwarehouse import core
from kvwarehouse.errors import TransportError
from kvwarehouse.remote import epochs, gets, store_gate
from kvwarehouse.remote.damaged_objects import DamagedObjects
from kvwarehouse.remote.gets import GetEnded, Gets, GetSource, Taken
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import StoreSettings, open_store
from kvwarehouse.remote.store_gate import StoreGate
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually

FLEET, SPACE = bytes(range(16)), b"s" * 16
NAMES = FleetNames(FLEET)
DAY, EPOCH = 20_000, 5
DATA = bytes(range(100))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Run:
    key: bytes = b"k" * 16
    namespace_id: bytes = SPACE
    epoch: int = EPOCH
    day: int = DAY
    begin: int = 0
    end: int = len(DATA)
    within_s: float = 1000.0


@dataclass
class Filled:
    end: str = "filled"
    pages: int = 4
    fault: str = ""
    parent: bytes = bytes(16)


class Presence:
    def __init__(self) -> None:
        self.removed: list[tuple[bytes, int, int]] = []

    def remove(self, key: bytes, epoch: int, day: int) -> bool:
        self.removed.append((key, epoch, day))
        return True


@dataclass
class Rig:
    clock: Clock = field(default_factory=Clock)
    presence: Presence = field(default_factory=Presence)
    bodies: list[bytes] = field(default_factory=list)
    within_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept = open_store(StoreSettings("memory:///"))
        self.gate = StoreGate(self.clock)
        self.fill: Callable[[Run], Filled] = lambda run: Filled()
        self.fresh_until_s = float("inf")
        self.damaged = DamagedObjects()
        source = GetSource(
            self.kept, NAMES, self.presence.remove, self.damaged, lambda: self.fresh_until_s
        )
        self.gets = Gets(source, self._fill, self.gate, self.clock)

    def _fill(self, run: Any, body: Any, within_s: float) -> Any:
        self.bodies.append(bytes(body))
        self.within_s.append(within_s)
        return self.fill(run)

    def store(self, key: bytes = b"k" * 16, data: bytes = DATA) -> None:
        self.kept.put(NAMES.pages(PagesName(SPACE, EPOCH, DAY, key)), data)

    def get(self, **fields: Any) -> GetEnded:
        return self.end(self.take(**fields))

    def take(self, **fields: Any) -> Taken:
        run: Any = Run(**fields)
        taken = self.gets.take(lambda: run)
        assert taken is not None
        assert taken.run is run
        return taken

    def end(self, taken: Taken) -> GetEnded:
        ended = self.gets.get(taken)
        assert ended.end in core.GET_ENDS
        return ended

    def fails(self, monkeypatch: pytest.MonkeyPatch, code: str) -> list[str]:
        """Names that were asked for since."""
        asked: list[str] = []

        def get(name: str, *unused: Any) -> None:
            asked.append(name)
            raise TransportError("the text of it", code=code)

        monkeypatch.setattr(self.kept, "get", get)
        return asked


def test_range_that_is_wanted_is_filled() -> None:
    rig = Rig()
    rig.store()
    assert rig.get(begin=10, end=30) == ("filled", 4)
    assert rig.bodies == [DATA[10:30]]
    assert (rig.gets.ends, rig.gets.get_bytes, rig.gets.damaged) == ({"filled": 1}, 20, {})
    assert rig.presence.removed == []


def test_object_that_is_not_there_leaves_the_filter() -> None:
    rig = Rig()
    assert rig.get() == ("missing", 0)
    assert rig.presence.removed == [(b"k" * 16, EPOCH, DAY)]
    assert (rig.bodies, rig.gets.get_bytes) == ([], 0)


def test_object_that_is_damaged_leaves_the_filter_and_not_the_store() -> None:
    rig = Rig()
    rig.store()
    rig.fill = lambda run: Filled("damaged", 2, "digest")
    assert rig.get() == ("damaged", 2)
    assert rig.presence.removed == [(b"k" * 16, EPOCH, DAY)]
    assert rig.gets.damaged == {"digest": 1}
    assert rig.damaged.has(b"k" * 16, EPOCH)
    assert rig.kept.get(NAMES.pages(PagesName(SPACE, EPOCH, DAY, b"k" * 16)), 0, 1) is not None


@pytest.mark.parametrize("fault", ["place", "shape"])
def test_object_that_is_not_what_a_client_said_is_not_taken_for_damaged(fault: str) -> None:
    rig = Rig()
    rig.store()
    rig.fill = lambda run: Filled("damaged", 0, fault)
    assert rig.get() == ("damaged", 0)
    assert not rig.damaged.has(b"k" * 16, EPOCH)
    assert rig.presence.removed == []


@pytest.mark.parametrize("end", ["late", "no_room", "cleared"])
def test_what_the_daemon_does_not_take_stays_in_the_filter(end: str) -> None:
    rig = Rig()
    rig.store()
    rig.fill = lambda run: Filled(end, 1, "busy")
    assert rig.get() == (end, 1)
    assert rig.presence.removed == []


def test_store_that_fails_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    asked = rig.fails(monkeypatch, "remote_failed")
    assert rig.get() == ("failed", 0)
    assert len(asked) == 1
    assert rig.presence.removed == []
    assert rig.gate.problem is None


def test_store_that_refuses_is_not_asked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.store()
    with monkeypatch.context() as patched:
        asked = rig.fails(patched, "remote_refused")
        assert [rig.get().end, rig.get().end] == ["failed", "failed"]
        assert len(asked) == 1
    rig.clock.now_s += store_gate.PROBE_EVERY_S
    assert rig.get().end == "filled"
    assert rig.get().end == "filled"


def test_run_that_nobody_waits_for_any_more_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    asked = rig.fails(monkeypatch, "remote_failed")
    assert rig.get(within_s=0.0) == ("late", 0)
    assert asked == []


def test_object_that_comes_late_is_stored_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def get(*unused: Any) -> memoryview:
        rig.clock.now_s += 20
        return memoryview(DATA)

    monkeypatch.setattr(rig.kept, "get", get)
    assert rig.get(within_s=10.0) == ("filled", 4)
    assert rig.within_s[0] > 0
    assert rig.get(within_s=30.0) == ("filled", 4)
    assert rig.within_s[1] == 10


@pytest.mark.parametrize(
    ("took_s", "end", "bodies"),
    [(14, ("filled", 4), 1), (15, ("late", 0), 0), (50, ("late", 0), 0)],
)
def test_object_that_comes_once_clears_are_not_known_is_not_stored(
    took_s: float, end: tuple[str, int], bodies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: a host could get and not list. Its gets ended much later than it knew what was
    cleared, and what was cleared by then was served from its DRAM."""
    rig = Rig()
    rig.fresh_until_s = rig.clock.now_s + epochs.FRESH_S

    def get(*unused: Any) -> memoryview:
        rig.clock.now_s += took_s
        return memoryview(DATA)

    monkeypatch.setattr(rig.kept, "get", get)
    assert rig.get() == end
    assert len(rig.bodies) == bodies
    assert all(within_s <= gets.AFTER_FRESH_S for within_s in rig.within_s)
    assert rig.presence.removed == []


def test_object_whose_first_one_comes_once_clears_are_not_known_is_not_stored() -> None:
    rig = Rig()
    rig.fresh_until_s = rig.clock.now_s
    rig.store()

    def fill(run: Run) -> Filled:
        rig.clock.now_s += gets.AFTER_FRESH_S
        return Filled("no_room", 0, "parent_missing", b"1" * 16)

    rig.fill = fill
    assert rig.get() == ("late", 0)
    assert len(rig.bodies) == 1


def test_first_of_two_runs_that_comes_second_is_waited_for() -> None:
    rig = Rig()
    rig.store(b"1" * 16)
    rig.store(b"2" * 16)
    stored: set[bytes] = set()
    second_waits, first_may = threading.Event(), threading.Event()

    def fill(run: Run) -> Filled:
        if run.key == b"1" * 16:
            assert first_may.wait(DEADLINE_S)
            stored.add(run.key)
        elif b"1" * 16 not in stored:
            second_waits.set()
            return Filled("no_room", 0, "parent_missing", b"1" * 16)
        return Filled()

    rig.fill = fill
    ends: list[GetEnded] = []
    threads = [
        threading.Thread(target=lambda key=key: ends.append(rig.get(key=key)))
        for key in (b"1" * 16, b"2" * 16)
    ]
    threads[0].start()
    eventually(lambda: rig.bodies, "the first fills")
    threads[1].start()
    assert second_waits.wait(DEADLINE_S)
    first_may.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert ends == [("filled", 4)] * 2


def test_run_whose_first_one_ended_otherwise_ends_at_once() -> None:
    rig = Rig()
    rig.store(b"2" * 16)
    rig.fill = lambda run: Filled("no_room", 0, "parent_missing", b"1" * 16)
    assert rig.get(key=b"1" * 16).end == "missing"
    assert rig.get(key=b"2" * 16) == ("no_room", 0)
    assert len(rig.bodies) == 2  # it may have been stored between a look and the other


def test_run_waits_for_the_first_one_no_longer_than_its_client() -> None:
    rig = Rig()
    rig.store(b"1" * 16)
    rig.store(b"2" * 16)
    first_may = threading.Event()

    def fill(run: Run) -> Filled:
        if run.key == b"1" * 16:
            assert first_may.wait(DEADLINE_S)
            return Filled()
        return Filled("no_room", 0, "parent_missing", b"1" * 16)

    rig.fill = fill
    thread = threading.Thread(target=lambda: rig.get(key=b"1" * 16))
    thread.start()
    eventually(lambda: rig.bodies, "the first fills")
    assert rig.get(key=b"2" * 16, within_s=0.05) == ("no_room", 0)
    first_may.set()
    thread.join(DEADLINE_S)


def test_objects_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gets, "BODIES_BYTES", 2 * len(DATA))
    rig = Rig()
    rig.store()
    inside, may_go = threading.Semaphore(0), threading.Event()

    def fill(run: Run) -> Filled:
        inside.release()
        assert may_go.wait(DEADLINE_S)
        return Filled()

    rig.fill = fill
    threads = [threading.Thread(target=rig.get) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert inside.acquire(timeout=DEADLINE_S)
    assert inside.acquire(timeout=DEADLINE_S)
    assert not inside.acquire(timeout=0.05)
    assert rig.get(within_s=0.01) == ("late", 0)
    may_go.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert rig.gets.ends == {"filled": 3, "late": 1}


def test_run_holds_no_memory_that_its_first_one_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gets, "BODIES_BYTES", len(DATA))  # of one of them
    rig = Rig()
    rig.store(b"1" * 16)
    rig.store(b"2" * 16)
    stored: set[bytes] = set()

    def fill(run: Run) -> Filled:
        if run.key == b"2" * 16 and b"1" * 16 not in stored:
            return Filled("no_room", 0, "parent_missing", b"1" * 16)
        stored.add(run.key)
        return Filled()

    rig.fill = fill
    first, second = (rig.take(key=key) for key in (b"1" * 16, b"2" * 16))
    ends: list[GetEnded] = []
    threads = [
        threading.Thread(target=lambda taken=taken: ends.append(rig.end(taken)), daemon=True)
        for taken in (second, first)
    ]
    for thread in threads:
        thread.start()
        thread.join(0.05)  # the second one's is sooner
    for thread in threads:
        thread.join(DEADLINE_S)
    assert ends == [("filled", 4)] * 2
    assert len(rig.bodies) == 2


def test_run_waits_for_none_that_was_taken_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for the memory that this one holds."""
    monkeypatch.setattr(gets, "BODIES_BYTES", len(DATA))
    rig = Rig()
    rig.store(b"2" * 16)
    rig.fill = lambda run: Filled("no_room", 0, "parent_missing", b"1" * 16)
    second = rig.take(key=b"2" * 16)
    rig.take(key=b"1" * 16)
    ends: list[GetEnded] = []
    thread = threading.Thread(target=lambda: ends.append(rig.end(second)), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert ends == [("no_room", 0)]


@pytest.mark.parametrize("parents", [(1, 2), (2, 1)], ids=["themselves", "each other"])
def test_objects_that_hang_on_themselves_keep_no_thread(parents: tuple[int, int]) -> None:
    """Engine keys do not bind a page to its parent: an object may name any."""
    rig = Rig()
    keys = [bytes([number] * 16) for number in (1, 2)]
    parent_of = {key: bytes([parent] * 16) for key, parent in zip(keys, parents, strict=True)}
    for key in keys:
        rig.store(key)
    both_fill = threading.Barrier(2)
    asked: set[bytes] = set()

    def fill(run: Run) -> Filled:
        if run.key not in asked:
            asked.add(run.key)
            both_fill.wait(DEADLINE_S)
        return Filled("no_room", 0, "parent_missing", parent_of[run.key])

    rig.fill = fill
    taken = [rig.take(key=key) for key in keys]
    ends: list[GetEnded] = []
    threads = [
        threading.Thread(target=lambda each=each: ends.append(rig.end(each)), daemon=True)
        for each in taken
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert ends == [("no_room", 0)] * 2


def test_what_filling_raises_goes_on_and_leaves_nothing_taken() -> None:
    rig = Rig()
    rig.store()

    def fill(run: Run) -> Filled:
        raise ZeroDivisionError

    rig.fill = fill
    with pytest.raises(ZeroDivisionError):
        rig.get()
    rig.fill = lambda run: Filled()
    assert rig.get(end=gets.BODIES_BYTES + 1) == ("filled", 4)  # all of the memory is free
