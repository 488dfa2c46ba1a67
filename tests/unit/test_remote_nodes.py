"""Who lives in a fleet, by the store's clock, and what nodes tell each other of their puts."""

from __future__ import annotations

from typing import Any

import pytest

from kvwarehouse.errors import TransportError
from kvwarehouse.remote import delta as delta_format
from kvwarehouse.remote import deltas as delta_rules
from kvwarehouse.remote import nodes as node_rules
from kvwarehouse.remote.deltas import Deltas
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.nodes import Nodes, StoreClock
from testkit.timed_store import HostClock, TimedStore

FLEET = bytes(range(16))
NAMES = FleetNames(FLEET)
MIDNIGHT_S = 20785 * 86400.0


class Host:
    """One node, whose clock goes as the store's does, from anywhere."""

    def __init__(self, store: TimedStore, node: int, now_s: float) -> None:
        self.clock = HostClock(now_s)
        self.store_clock = StoreClock(self.clock)
        self.nodes = Nodes(store, NAMES, node, self.store_clock, self.clock)
        self.deltas = Deltas(store, NAMES, node, self.nodes, self.store_clock, self.clock)


class Fleet:
    def __init__(self, nodes: int) -> None:
        self.now = HostClock(MIDNIGHT_S - 30)
        self.store = TimedStore(self.now)
        self.hosts = [Host(self.store, node + 1, 77.0 * node) for node in range(nodes)]

    def goes(self, seconds: float) -> None:
        self.now.now_s += seconds
        for host in self.hosts:
            host.clock.now_s += seconds

    def beats(self, *hosts: int) -> None:
        for host in hosts:
            self.hosts[host].nodes.round()


def test_time_is_the_stores_and_goes_on_between_beats() -> None:
    fleet = Fleet(2)
    first = fleet.hosts[0]
    assert not first.store_clock.is_known
    fleet.beats(0)
    assert first.store_clock.now_ms() == (MIDNIGHT_S - 30) * 1000
    assert first.store_clock.today() == 20784
    fleet.goes(30)
    assert first.store_clock.today() == 20785
    assert first.store_clock.now_ms() == MIDNIGHT_S * 1000


def test_clock_follows_the_store_where_it_is_set() -> None:
    fleet = Fleet(1)
    fleet.beats(0)
    fleet.goes(node_rules.BEAT_S)
    fleet.now.now_s += 86400
    assert fleet.hosts[0].store_clock.today() == 20785
    fleet.beats(0)
    assert fleet.hosts[0].store_clock.today() == 20786


@pytest.mark.parametrize("jump_s", [7 * 86400.0, -7 * 86400.0])
def test_clock_that_jumps_is_doubted_until_it_has_said_so_for_an_hour(jump_s: float) -> None:
    fleet = Fleet(1)
    fleet.beats(0)
    clock = fleet.hosts[0].store_clock
    fleet.now.now_s += jump_s
    for _ in range(node_rules.BELIEVED_AFTER - 1):
        fleet.goes(node_rules.BEAT_S)
        fleet.beats(0)
        assert clock.now_ms() == (fleet.now.now_s - jump_s) * 1000
        assert clock.jump_s == jump_s
        assert (fleet.hosts[0].nodes.living, clock.is_known) == (1, True)
    fleet.goes(node_rules.BEAT_S)
    fleet.beats(0)
    assert (clock.now_ms(), clock.jump_s) == (fleet.now.now_s * 1000, 0.0)


def test_clock_that_is_set_right_again_is_believed_at_once() -> None:
    fleet = Fleet(1)
    fleet.beats(0)
    clock = fleet.hosts[0].store_clock
    for jump_s, doubted_s in ((7 * 86400.0, 7 * 86400.0), (-7 * 86400.0, 0.0)):
        fleet.now.now_s += jump_s
        fleet.goes(node_rules.BEAT_S)
        fleet.beats(0)
        assert (clock.jump_s, clock.today()) == (doubted_s, 20785)


def test_clock_that_says_something_else_each_time_is_never_believed() -> None:
    fleet = Fleet(1)
    fleet.beats(0)
    clock = fleet.hosts[0].store_clock
    fleet.now.now_s += 7 * 86400
    for beat in range(2 * node_rules.BELIEVED_AFTER):
        fleet.now.now_s += 7200 * (-1) ** beat
        fleet.goes(node_rules.BEAT_S)
        fleet.beats(0)
        assert clock.jump_s > 6 * 86400


def test_clock_that_was_never_set_is_not_read() -> None:
    with pytest.raises(AssertionError):
        StoreClock(HostClock()).now_ms()


def test_nodes_that_beat_live_and_those_that_stop_die() -> None:
    fleet = Fleet(3)
    fleet.beats(0, 1, 2)
    assert [host.nodes.living for host in fleet.hosts] == [1, 2, 3]
    fleet.goes(node_rules.BEAT_S)
    fleet.beats(0, 1)
    assert [host.nodes.living for host in fleet.hosts[:2]] == [3, 3]
    assert [host.nodes.is_smallest for host in fleet.hosts[:2]] == [True, False]
    for _ in range(4):
        fleet.goes(node_rules.BEAT_S)
        fleet.beats(1)
    assert fleet.hosts[1].nodes.living == 2  # the third is five minutes old
    fleet.goes(node_rules.BEAT_S)
    fleet.beats(1)
    assert fleet.hosts[1].nodes.living == 1
    assert fleet.hosts[1].nodes.is_smallest


def test_node_beats_once_a_minute_and_sooner_after_a_failure() -> None:
    fleet = Fleet(1)
    fleet.beats(0)
    calls = fleet.store.calls
    fleet.goes(node_rules.BEAT_S - 1)
    fleet.beats(0)
    assert fleet.store.calls == calls
    fleet.goes(1)
    fleet.store.fails = lambda number: True
    with pytest.raises(TransportError):
        fleet.beats(0)
    fleet.beats(0)  # not due
    fleet.store.fails = lambda number: False
    fleet.goes(node_rules.RETRY_S)
    calls = fleet.store.calls
    fleet.beats(0)
    assert fleet.store.calls > calls


def test_node_is_seen_after_two_intervals_and_not_while_others_may_forget_it() -> None:
    fleet = Fleet(1)
    nodes = fleet.hosts[0].nodes
    fleet.beats(0)
    assert not nodes.is_seen
    for _ in range(2):
        assert not nodes.is_seen
        fleet.goes(node_rules.BEAT_S)
        fleet.beats(0)
    assert nodes.is_seen
    fleet.store.fails = lambda number: True
    fleet.goes(node_rules.QUIET_S)
    assert nodes.is_seen
    fleet.goes(1)
    assert not nodes.is_seen
    fleet.store.fails = lambda number: False
    fleet.beats(0)
    assert not nodes.is_seen  # it begins anew
    for _ in range(2):
        fleet.goes(node_rules.BEAT_S)
        fleet.beats(0)
    assert nodes.is_seen


def test_what_has_no_nodes_name_counts_for_nothing() -> None:
    fleet = Fleet(1)
    for name in ("node/else", "node/0/1", f"node/{1:017x}"):
        fleet.store.put(NAMES.root + name, b"")
    fleet.store.put(FleetNames(bytes(16)).node(0), b"")
    fleet.beats(0)
    assert fleet.hosts[0].nodes.living == 1


def name_of(number: int) -> PagesName:
    return PagesName(b"n" * 16, 0, 20785, number.to_bytes(16, "big"))


def told(store: TimedStore) -> list[tuple[int, int, list[int]]]:
    """Of all deltas in their order: milliseconds, bytes put, keys."""
    found = []
    for name in store.names():
        of = NAMES.delta_of(name)
        if of is not None:
            delta = delta_format.decode(FLEET, store.read(name))
            assert delta is not None
            keys = [int.from_bytes(entry.name.key, "big") for entry in delta.entries]
            assert delta.node == of[1]
            found.append((of[0], delta.put_bytes, keys))
    return found


def test_delta_tells_all_puts_once_and_only_where_there_are_some() -> None:
    fleet = Fleet(1)
    fleet.beats(0)
    host = fleet.hosts[0]
    host.deltas.round()
    assert told(fleet.store) == []
    host.deltas.add(name_of(1), 1025)
    host.deltas.add(name_of(2), 100)
    host.deltas.round()
    now_ms = int(fleet.now.now_s * 1000)
    assert told(fleet.store) == [(now_ms, 1125, [1, 2])]
    host.deltas.add(name_of(3), 7)
    host.deltas.round()
    fleet.goes(delta_rules.INTERVAL_S - 1)
    host.deltas.round()
    assert len(told(fleet.store)) == 1
    fleet.goes(1)
    host.deltas.round()
    assert told(fleet.store)[1] == (now_ms + 5000, 7, [3])
    sizes = delta_format.decode(FLEET, fleet.store.read(NAMES.delta(now_ms, 1)))
    assert sizes is not None
    assert [entry.size_kib for entry in sizes.entries] == [2, 1]


@pytest.mark.parametrize("answer_is_lost", [False, True])
def test_delta_that_failed_is_told_by_the_next(answer_is_lost: bool) -> None:
    fleet = Fleet(1)
    fleet.beats(0)
    host = fleet.hosts[0]
    host.deltas.add(name_of(1), 10)
    fleet.store.fails, fleet.store.after = (lambda number: True), answer_is_lost
    with pytest.raises(TransportError):
        host.deltas.round()
    host.deltas.add(name_of(2), 10)
    fleet.store.fails = lambda number: False
    fleet.goes(delta_rules.INTERVAL_S)
    host.deltas.round()
    assert [entry[1:] for entry in told(fleet.store)][-1] == (20, [1, 2])
    assert len(told(fleet.store)) == 1 + answer_is_lost
    assert host.deltas.waiting == 0


def test_what_is_put_while_a_delta_is_on_its_way_is_told_by_the_next() -> None:
    fleet = Fleet(1)
    fleet.beats(0)
    host = fleet.hosts[0]
    put = fleet.store.put

    def slow(name: str, data: Any, **settings: Any) -> bool:
        host.deltas.add(name_of(2), 20)
        return put(name, data, **settings)

    host.deltas.add(name_of(1), 10)
    fleet.store.put = slow  # type: ignore[method-assign]
    host.deltas.round()
    fleet.store.put = put  # type: ignore[method-assign]
    fleet.goes(delta_rules.INTERVAL_S)
    host.deltas.round()
    assert [entry[1:] for entry in told(fleet.store)] == [(10, [1]), (20, [2])]


def test_more_than_a_delta_holds_goes_into_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_format, "ENTRIES_MAX", 3)
    monkeypatch.setattr(delta_rules, "WAITING_MAX", 5)
    fleet = Fleet(1)
    fleet.beats(0)
    host = fleet.hosts[0]
    for number in range(7):
        host.deltas.add(name_of(number), 1)
    for _ in range(3):
        host.deltas.round()
        fleet.goes(delta_rules.INTERVAL_S)
    # The first two are left to listings, their bytes are not.
    assert [entry[1:] for entry in told(fleet.store)] == [(7, [2, 3, 4]), (0, [5, 6])]


def test_deltas_are_rarer_where_more_than_ten_nodes_write_them() -> None:
    fleet = Fleet(30)
    fleet.beats(*range(30))
    host = fleet.hosts[29]
    host.deltas.add(name_of(1), 1)
    host.deltas.round()
    host.deltas.add(name_of(2), 1)
    fleet.goes(delta_rules.INTERVAL_S + 20 * delta_rules.MORE_S - 1)
    host.deltas.round()
    assert len(told(fleet.store)) == 1
    fleet.goes(1)
    host.deltas.round()
    assert len(told(fleet.store)) == 2


def test_deltas_have_names_of_their_own_where_the_clock_is_set_back() -> None:
    fleet = Fleet(1)
    fleet.beats(0)
    host = fleet.hosts[0]
    for number in range(3):
        host.deltas.add(name_of(number), 1)
        host.deltas.round()
        fleet.goes(delta_rules.INTERVAL_S)
        host.store_clock.set(MIDNIGHT_S - 100, host.clock.now_s)
    assert [keys for _, _, keys in told(fleet.store)] == [[0], [1], [2]]
