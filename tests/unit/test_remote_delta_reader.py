"""What a node reads of the others' deltas: each once, also those that come late, and nothing that
is none."""

from __future__ import annotations

import pytest

from kvwarehouse.errors import TransportError
from kvwarehouse.remote import delta
from kvwarehouse.remote.delta import Delta, DeltaEntry
from kvwarehouse.remote.delta_reader import LATE_MS, READS_MAX, DeltaReader
from kvwarehouse.remote.deltas import INTERVAL_S
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.nodes import Nodes, StoreClock
from testkit.timed_store import HostClock, KeptPages, TimedStore

FLEET, NAMESPACE = bytes(range(16)), bytes(16)
NAMES = FleetNames(FLEET)
OWN, OTHER = 1, 2
NOW_S = 20785 * 86400.0 + 3600
TODAY = 20785


class Reader:
    def __init__(self) -> None:
        self.clock, self.now = HostClock(), HostClock(NOW_S)
        self.store, self.sink = TimedStore(self.now), KeptPages(today=TODAY)
        store_clock = StoreClock(self.clock)
        store_clock.set(NOW_S, self.clock())
        nodes = Nodes(self.store, NAMES, OWN, store_clock, self.clock)
        self.reader = DeltaReader(self.store, NAMES, self.sink, OWN, nodes, self.clock)

    def put(self, number: int, ago_ms: int = 0, node: int = OTHER, day: int = TODAY) -> PagesName:
        """A delta of one object, and what it is called."""
        name = PagesName(NAMESPACE, 3, day, number.to_bytes(16, "big"))
        data = delta.encode(FLEET, Delta(node, 1024, [DeltaEntry(name, 1)]))
        self.store.put(NAMES.delta(int(self.now() * 1000) - ago_ms, node), data)
        return name

    def goes(self, seconds: float = INTERVAL_S) -> None:
        self.clock.pass_by(seconds)
        self.now.pass_by(seconds)

    def has(self, *names: PagesName) -> bool:
        return all(self.sink.has(name) for name in names)


def test_what_another_node_has_put_is_known_at_the_next_reading() -> None:
    rig = Reader()
    rig.reader.round()
    name = rig.put(1)
    rig.goes(INTERVAL_S - 1)
    rig.reader.round()
    assert not rig.has(name)
    rig.goes(1)
    rig.reader.round()
    assert rig.has(name)


def test_each_delta_is_read_once_and_those_of_this_node_never() -> None:
    rig = Reader()
    rig.put(1)
    rig.put(2, node=OWN)
    for _ in range(3):
        rig.reader.round()
        rig.goes()
    assert rig.sink.puts == 1


def test_delta_that_is_there_after_later_ones_is_read_too() -> None:
    rig = Reader()
    first = rig.put(1)
    rig.reader.round()
    rig.goes()
    late = rig.put(2, ago_ms=LATE_MS - 2000)
    rig.reader.round()
    assert rig.has(first, late)


def test_deltas_from_before_the_start_are_the_listings() -> None:
    rig = Reader()
    old, young = rig.put(1, ago_ms=LATE_MS + 1000), rig.put(2, ago_ms=LATE_MS - 1000)
    rig.reader.round()
    assert rig.has(young)
    assert not rig.has(old)


def test_node_that_was_cut_off_reads_all_that_came_meanwhile() -> None:
    rig = Reader()
    rig.reader.round()
    rig.store.fails = lambda call: True
    rig.goes()
    with pytest.raises(TransportError):
        rig.reader.round()
    rig.store.fails = lambda call: False
    missed = rig.put(1)
    rig.goes(20 * LATE_MS / 1000)
    rig.reader.round()
    assert rig.has(missed)


def test_reading_that_fails_half_way_is_taken_up_again() -> None:
    rig = Reader()
    names = [rig.put(number, ago_ms=100 - number) for number in range(4)]
    rig.store.fails = lambda call: call == rig_call + 3
    rig_call = rig.store.calls
    with pytest.raises(TransportError):
        rig.reader.round()
    assert not rig.has(*names)
    rig.goes()
    rig.reader.round()
    assert rig.has(*names)
    assert rig.sink.puts == 4


def test_more_than_a_round_reads_wait_for_the_next_ones() -> None:
    rig = Reader()
    names = [rig.put(number, ago_ms=1000 - number) for number in range(2 * READS_MAX + 1)]
    for _ in range(2):
        rig.reader.round()
        assert not rig.has(*names)
    rig.reader.round()
    assert rig.has(*names)
    assert rig.sink.puts == len(names)


def test_what_is_read_is_forgotten_when_it_is_listed_no_more() -> None:
    rig = Reader()
    for number in range(200):
        rig.put(number)
        rig.reader.round()
        rig.goes()
    assert rig.sink.puts == 200
    assert len(rig.reader._read) <= LATE_MS / 1000 / INTERVAL_S + 2


@pytest.mark.parametrize("data", [b"", b"x" * 100, bytes(delta.DELTA_BYTES_MAX)])
def test_what_is_no_delta_is_passed_over(data: bytes) -> None:
    rig = Reader()
    rig.store.put(NAMES.delta(int(rig.now() * 1000), OTHER), data)
    rig.store.put(f"{NAMES.deltas_prefix}something", b"else")
    name = rig.put(1)
    rig.reader.round()
    assert rig.has(name)
    assert rig.sink.puts == 1


def test_days_to_come_are_not_believed() -> None:
    rig = Reader()
    names = [rig.put(number, ago_ms=number, day=TODAY + number) for number in range(2)]
    rig.reader.round()
    assert [rig.has(name) for name in names] == [True, False]
