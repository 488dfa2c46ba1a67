"""A fleet stays within its capacity, though no node knows what the others do meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvwarehouse.remote import capacity as rules
from kvwarehouse.remote import listing
from kvwarehouse.remote.capacity import Capacity
from testkit.timed_store import HostClock

INTERVAL_S = int(listing.INTERVAL_S)
TODAY = 20785


def granted(capacity: Capacity, used: int, living: int, clock: HostClock) -> int:
    capacity.listed({TODAY: used}, clock.now_s)
    capacity.grant(living)
    return capacity.room_bytes


def test_grant_is_the_nodes_share_of_what_is_left() -> None:
    clock = HostClock()
    capacity = Capacity(1000, clock)
    assert granted(capacity, 400, 4, clock) == 600 // (rules.SHARES * 4)
    assert granted(capacity, 1000, 1, clock) == 0
    assert granted(capacity, 5000, 1, clock) == 0
    assert not capacity.admit(1)


def test_nothing_is_admitted_before_a_grant() -> None:
    clock = HostClock()
    capacity = Capacity(1000, clock)
    assert not capacity.admit(1)
    capacity.grant(1)
    assert not capacity.admit(1)
    capacity.listed({}, clock.now_s)
    assert not capacity.admit(1)
    assert capacity.bytes_of_days(TODAY) == {TODAY: 0}
    capacity.grant(1)
    assert capacity.admit(1)


def test_what_is_given_back_was_never_admitted() -> None:
    clock = HostClock()
    capacity = Capacity(3000, clock)
    assert granted(capacity, 0, 1, clock) == 1000
    for _ in range(3):
        assert capacity.admit(600)
        clock.now_s += 1
        assert capacity.admit(400)
        assert not capacity.admit(1)
        capacity.give_back(600)
        capacity.give_back(400)
        assert capacity.used_bytes == 0
        assert capacity.bytes_of_days(TODAY) == {TODAY: 0}
    assert granted(capacity, 2940, 1, clock) == 20
    capacity.give_back(600)  # of a grant of before
    assert (capacity.room_bytes, capacity.used_bytes) == (20, 2940)


def test_grant_is_spent_once_and_made_once_for_a_listing() -> None:
    clock = HostClock()
    capacity = Capacity(3000, clock)
    assert granted(capacity, 0, 1, clock) == 1000
    assert capacity.admit(600)
    assert not capacity.admit(401)
    assert capacity.is_full
    assert capacity.admit(400)
    assert not capacity.is_full
    capacity.grant(1)
    assert not capacity.admit(1)
    assert capacity.used_bytes == 1000


def test_grant_ends_though_no_listing_follows() -> None:
    clock = HostClock()
    capacity = Capacity(3000, clock)
    capacity.listed({}, clock.now_s)
    clock.now_s += 100  # the listing took as long
    capacity.grant(1)
    clock.now_s += rules.GRANT_S - 101
    assert capacity.admit(1)
    clock.now_s += 1
    assert not capacity.admit(1)
    assert not capacity.is_full
    assert capacity.room_bytes == 0


def test_own_puts_count_until_a_listing_that_must_have_them() -> None:
    clock = HostClock()
    capacity = Capacity(1 << 20, clock)
    granted(capacity, 0, 1, clock)
    assert capacity.admit(100)
    clock.now_s += rules.UNDER_WAY_S
    assert capacity.admit(10)
    # It may have missed both: the first was perhaps still under way.
    capacity.listed({TODAY: 7}, clock.now_s)
    assert capacity.used_bytes == 117
    assert capacity.bytes_of_days(TODAY) == {TODAY: 117}
    clock.now_s += 2
    capacity.listed({TODAY: 107}, clock.now_s)
    assert capacity.used_bytes == 117
    clock.now_s += rules.UNDER_WAY_S
    capacity.listed({TODAY: 117}, clock.now_s)
    assert capacity.used_bytes == 117


def test_day_that_is_deleted_counts_no_more() -> None:
    clock = HostClock()
    capacity = Capacity(1000, clock)
    capacity.dropped(TODAY)
    assert capacity.bytes_of_days(TODAY) is None
    capacity.listed({TODAY - 1: 500, TODAY: 300}, clock.now_s)
    capacity.dropped(TODAY - 1)
    assert capacity.used_bytes == 300


def test_day_that_is_deleted_makes_room_for_the_next_grant_and_not_for_this_one() -> None:
    clock = HostClock()
    capacity = Capacity(900, clock)
    capacity.listed({TODAY - 1: 600, TODAY: 300}, clock.now_s)
    capacity.grant(1)
    capacity.dropped(TODAY - 1)
    capacity.grant(1)
    assert (capacity.room_bytes, capacity.admit(1)) == (0, False)
    clock.now_s += INTERVAL_S
    assert granted(capacity, 300, 1, clock) == 200


class Hosts:
    """Nodes that put and list as they like, and the bytes that the store has in truth."""

    def __init__(self, capacity_bytes: int) -> None:
        self.clock = HostClock(0.0)
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.most_bytes = 0
        self.nodes: dict[int, Capacity] = {}
        self.under_way: dict[int, tuple[float, int]] = {}

    def joins(self, node: int) -> None:
        self.nodes[node] = Capacity(self.capacity_bytes, self.clock)

    def begins_listing(self, node: int) -> None:
        """It will miss all that is put from now on."""
        self.under_way[node] = self.clock.now_s, self.used_bytes

    def ends_listing(self, node: int, living: int) -> None:
        began_s, used_bytes = self.under_way.pop(node)
        self.nodes[node].listed({TODAY: used_bytes}, began_s)
        self.nodes[node].grant(living)

    def lists(self, node: int, living: int) -> None:
        self.begins_listing(node)
        self.ends_listing(node, living)

    def puts(self, node: int, size_bytes: int) -> bool:
        if not self.nodes[node].admit(size_bytes):
            return False
        self.used_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        return True


STEP_S = 10
TAKES_S = 120


def random_hours(
    rng: random.Random,
    hosts: Hosts,
    hours: int,
    changes: Callable[[int, set[int]], None],
    greeds: Sequence[float],
) -> None:
    """Each node lists once an interval, at a time of its own, and puts what it likes: in each step
    with one of the probabilities `greeds`."""
    alive = set(hosts.nodes)
    offset = {node: rng.randrange(0, INTERVAL_S, STEP_S) for node in range(20)}
    greed = {node: rng.choice(greeds) for node in range(20)}
    for now_s in range(0, hours * INTERVAL_S, STEP_S):
        hosts.clock.now_s = float(now_s)
        changes(now_s, alive)
        for node in rng.sample(sorted(alive), len(alive)):
            at_s = (now_s - offset[node]) % INTERVAL_S
            if at_s == 0:
                hosts.begins_listing(node)
            if at_s == TAKES_S and node in hosts.under_way:
                hosts.ends_listing(node, len(alive))
            if rng.random() < greed[node]:
                hosts.puts(node, rng.randrange(1, hosts.capacity_bytes // 500))
            while rng.random() < 0.001 and hosts.puts(node, hosts.capacity_bytes // 1000):
                pass
        assert hosts.used_bytes <= hosts.capacity_bytes


# Of nodes that want little much is left over, which says nothing.
MIXED, GREEDY = (0.01, 0.1, 0.5, 1.0), (0.5, 1.0)


@pytest.mark.parametrize("greeds", [MIXED, GREEDY])
def test_five_nodes_that_put_for_hours_stay_within_the_capacity(
    rng: random.Random, greeds: Sequence[float]
) -> None:
    hosts = Hosts(10**6)
    for node in range(5):
        hosts.joins(node)
    random_hours(rng, hosts, 30, lambda now_s, alive: None, greeds)
    if greeds == GREEDY:  # and they use it
        assert hosts.most_bytes > 0.9 * hosts.capacity_bytes


@pytest.mark.parametrize("greeds", [MIXED, GREEDY])
def test_fleet_stays_within_its_capacity_while_nodes_join_and_die(
    rng: random.Random, greeds: Sequence[float]
) -> None:
    hosts = Hosts(10**6)
    for node in range(5):
        hosts.joins(node)

    def changes(now_s: int, alive: set[int]) -> None:
        if now_s == 3 * INTERVAL_S:
            alive.discard(1)
        if now_s == 4 * INTERVAL_S:
            for node in (5, 6, 7):
                hosts.joins(node)
                alive.add(node)
        if now_s % INTERVAL_S == 0 and now_s > 6 * INTERVAL_S:
            day = rng.randrange(hosts.used_bytes // 4)  # the janitor was there
            hosts.used_bytes -= day

    random_hours(rng, hosts, 24, changes, greeds)
    if greeds == GREEDY:
        assert hosts.most_bytes > 0.7 * hosts.capacity_bytes


def hold_to_the_end(count: int) -> Hosts:
    """The worst that nodes can do to each other: each keeps its grant until just before it lists,
    spends all of it, and they do so one after the other."""
    hosts = Hosts(10**12)
    hosts.clock.now_s = 0.0
    for node in range(count):
        hosts.joins(node)
        hosts.lists(node, count)
    ends_s = {node: INTERVAL_S * (node + 1) / count for node in range(count)}
    for turn in range(40 * count):
        node = turn % count
        hosts.clock.now_s = INTERVAL_S * (turn // count) + ends_s[node]
        hosts.puts(node, hosts.nodes[node].room_bytes)
        hosts.clock.now_s += 2 * rules.UNDER_WAY_S  # all that was put is listed
        hosts.lists(node, count)
    return hosts


@pytest.mark.parametrize("count", [2, 3, 5, 20, 100])
def test_nodes_that_hold_their_grants_to_the_end_stay_within_the_capacity(count: int) -> None:
    hosts = hold_to_the_end(count)
    assert 0.99 * hosts.capacity_bytes < hosts.most_bytes <= hosts.capacity_bytes


def test_node_that_cannot_list_for_long_spends_no_grant_of_long_ago() -> None:
    hosts = Hosts(10**6)
    for node in (0, 1):
        hosts.joins(node)
        hosts.lists(node, 2)
    late = hosts.nodes[1].room_bytes
    for _ in range(30):  # the other one lists, and spends all that it is granted
        hosts.puts(0, hosts.nodes[0].room_bytes)
        hosts.clock.now_s += INTERVAL_S
        hosts.lists(0, 2)
    assert hosts.used_bytes + late > hosts.capacity_bytes
    assert not hosts.puts(1, late)
    hosts.lists(1, 2)
    hosts.puts(1, hosts.nodes[1].room_bytes)
    assert hosts.most_bytes <= hosts.capacity_bytes


def test_larger_grants_would_go_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why SHARES is not 2."""
    monkeypatch.setattr(rules, "SHARES", 2)
    hosts = hold_to_the_end(20)
    assert hosts.most_bytes > hosts.capacity_bytes
