"""What a node does in its fleet's store beside putting pages: alone, with others, and while calls
fail."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvwarehouse.remote import delta as delta_format
from kvwarehouse.remote.fleet_store import FleetStore
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.nodes import DAY_MS
from testkit.timed_store import HostClock, KeptPages, TimedStore

pytestmark = pytest.mark.usefixtures("listed_without_pauses")

FLEET = bytes(range(16))
NAMES = FleetNames(FLEET)
BOUND_S = 60.0
BEGIN_S = 20785 * 86400.0 + 20 * 3600


@dataclass(frozen=True)
class Settings:
    capacity_bytes: int = 90_000
    ttl_days: int = 3


class Node:
    """A worker that puts: as it should, only what is admitted, and says what was stored."""

    def __init__(self, store: TimedStore, node: int, settings: Settings) -> None:
        self.clock = HostClock(50.0 * node)
        self.sink = KeptPages()
        self.store = store
        self.fleet = FleetStore(store, NAMES, self.sink, settings, node, self.clock)
        self.put: list[PagesName] = []
        self.failures = 0

    def round(self) -> None:
        """With the listing that it begins, if it begins one."""
        self.failures += self.fleet.round() is not None
        assert self.fleet.join_listing(BOUND_S)

    def puts(self, rng: random.Random, size: int) -> bool:
        """`size`: in units of the store's scale."""
        today = self.fleet.today
        if today is None or not self.fleet.admit(size * self.store.scale):
            return False
        name = PagesName(bytes([rng.randrange(3)]) * 16, 0, today, rng.randbytes(16))
        self.store.put(NAMES.pages(name), bytes(size))
        self.fleet.stored(name, size * self.store.scale)
        self.put.append(name)
        return True


class World:
    def __init__(
        self, nodes: int, settings: Settings | None = None, url: str = "memory:///", scale: int = 1
    ) -> None:
        self.now = HostClock(BEGIN_S)
        self.store = TimedStore(self.now, url, scale=scale)
        self.settings = settings or Settings()
        self.nodes: list[Node] = []
        self._joined = 0
        for _ in range(nodes):
            self.joins()

    def joins(self) -> None:
        self._joined += 1
        self.nodes.append(Node(self.store, self._joined, self.settings))

    def goes(self, seconds: float) -> None:
        self.now.now_s += seconds
        for node in self.nodes:
            node.clock.now_s += seconds

    def pass_by(self, seconds: int, step_s: int = 5) -> None:
        for _ in range(0, seconds, step_s):
            for node in self.nodes:
                node.round()
            self.goes(step_s)

    def pages_bytes(self) -> int:
        """In truth."""
        return sum(size for name, size in self.store.sizes() if NAMES.pages_of(name))

    def told_keys(self) -> list[bytes]:
        deltas = [name for name in self.store.names() if NAMES.delta_of(name)]
        found = [delta_format.decode(FLEET, self.store.read(name)) for name in deltas]
        return [entry.name.key for delta in found if delta for entry in delta.entries]


@pytest.fixture(params=["memory", "folder"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(1, url="memory:///" if request.param == "memory" else f"file://{tmp_path}")


def test_node_puts_once_it_has_listed_and_all_have_seen_it(
    world: World, rng: random.Random
) -> None:
    (node,) = world.nodes
    there = PagesName(b"n" * 16, 0, int(BEGIN_S) // 86400, b"k" * 16)
    world.store.put(NAMES.pages(there), bytes(3000))
    assert node.fleet.today is None
    assert not node.fleet.admit(1)
    world.pass_by(115)
    assert node.fleet.today == int(BEGIN_S) // 86400 == node.sink.newest
    assert node.sink.has(there)
    assert not node.fleet.admit(1)
    assert not node.fleet.facts().is_seen
    world.pass_by(10)
    facts = node.fleet.facts()
    assert facts.is_seen
    assert (facts.used_bytes, facts.objects, facts.nodes) == (3000, 1, 1)
    assert facts.room_bytes == (90_000 - 3000) // 3
    assert facts.put_if_absent
    assert 0 < facts.listed_ago_s <= 125
    assert node.puts(rng, 1000)
    assert node.sink.has(node.put[0])
    facts = node.fleet.facts()
    assert (facts.used_bytes, facts.objects) == (4000, 2)
    world.pass_by(10)
    assert world.told_keys() == [node.put[0].key]


def test_facts_of_a_node_that_knows_nothing_yet_say_so(world: World) -> None:
    facts = world.nodes[0].fleet.facts()
    assert (facts.used_bytes, facts.objects, facts.nodes, facts.room_bytes) == (0, 0, 1, 0)
    assert (facts.listed_ago_s, facts.put_if_absent, facts.is_full) == (-1.0, None, False)


def test_room_that_is_spent_comes_back_with_the_next_listing(
    world: World, rng: random.Random
) -> None:
    (node,) = world.nodes
    world.pass_by(130)
    while node.puts(rng, 1000):
        pass
    assert node.fleet.facts().is_full
    assert node.fleet.facts().used_bytes == 30_000 == world.pages_bytes()
    world.pass_by(3600)
    assert not node.fleet.facts().is_full
    assert node.fleet.facts().room_bytes == 20_000


def test_day_of_the_store_goes_into_the_filter(world: World) -> None:
    (node,) = world.nodes
    world.pass_by(60)
    world.goes(4 * 3600)
    world.pass_by(60)
    assert node.sink.newest == node.fleet.today == int(BEGIN_S) // 86400 + 1


def test_what_is_put_about_midnight_is_in_the_filter(world: World) -> None:
    """It takes no days to come, as it said of what a host ahead had put before this one's midnight,
    and of this one's own puts before its first round after."""
    (node,) = world.nodes
    world.pass_by(60)
    left_s = 86400 - int(world.now.now_s) % 86400
    world.goes(left_s - 300)
    world.pass_by(300 - 20)
    told, own = (
        PagesName(bytes([n]) * 16, 0, int(BEGIN_S) // 86400 + 1, b"k" * 16) for n in (1, 2)
    )
    entries = [delta_format.DeltaEntry(told, 1)]
    data = delta_format.encode(FLEET, delta_format.Delta(9, 1024, entries))
    world.store.put(NAMES.delta(int(world.now() * 1000) + 1, 9), data)
    world.pass_by(10)
    assert node.sink.has(told)
    assert node.sink.today == node.fleet.today == own.day - 1
    world.goes(15)
    assert node.fleet.today == own.day
    node.fleet.stored(own, 1)
    assert node.sink.has(own)
    world.pass_by(5)
    assert node.sink.today == own.day


def test_janitor_takes_old_days_out_of_store_filter_and_count(
    world: World, rng: random.Random
) -> None:
    (node,) = world.nodes
    today = int(BEGIN_S) // 86400
    days = {day: PagesName(b"n" * 16, 0, today - day, rng.randbytes(16)) for day in (0, 3, 4)}
    for name in days.values():
        world.store.put(NAMES.pages(name), bytes(1000))
    world.pass_by(20)
    assert [name for name in days.values() if node.sink.has(name)] == [days[0], days[3]]
    assert NAMES.pages(days[4]) not in world.store.names()
    assert node.fleet.facts().deleted_objects == 1
    world.pass_by(1300)
    assert node.fleet.facts().used_bytes == 2000


def test_what_is_used_daily_is_there_once_as_soon_as_all_have_listed_its_new_day(
    world: World,
) -> None:
    world.joins()
    node, other = world.nodes
    today = int(BEGIN_S) // 86400
    earlier = PagesName(b"n" * 16, 0, today - 1, b"k" * 16)
    newer = replace(earlier, day=today)
    world.store.put(NAMES.pages(earlier), bytes(1000))
    world.pass_by(300, step_s=60)
    assert other.sink.has(earlier)
    assert node.fleet.admit(1000)
    world.store.put(NAMES.pages(newer), bytes(1000))
    node.fleet.stored(newer, 1000, earlier.day)
    for _ in range(200):
        world.pass_by(60, step_s=60)
        if NAMES.pages(earlier) not in world.store.names():
            break
        known = other.sink.has(newer)
    assert known
    assert world.pages_bytes() == 1000
    assert node.fleet.facts().deleted_objects > other.fleet.facts().deleted_objects
    world.pass_by(3700, step_s=60)
    assert [each.fleet.facts().used_bytes for each in world.nodes] == [1000, 1000]


def test_nothing_is_deleted_while_the_stores_clock_is_doubted(world: World) -> None:
    (node,) = world.nodes
    world.pass_by(130)
    today = int(BEGIN_S) // 86400
    newer, earlier = (PagesName(b"n" * 16, 0, day, b"k" * 16) for day in (today, today - 1))
    for name in (newer, earlier):
        world.store.put(NAMES.pages(name), bytes(1000))
    node.fleet.stored(newer, 1000, earlier.day)
    world.pass_by(3000, step_s=100)
    world.now.now_s += 9 * 86400
    world.pass_by(1800, step_s=100)
    assert node.fleet.facts().clock_jump_s > 8 * 86400
    assert world.pages_bytes() == 2000
    world.now.now_s -= 9 * 86400
    world.pass_by(200, step_s=100)
    assert [name for name in world.store.names() if NAMES.pages_of(name)] == [NAMES.pages(newer)]


@pytest.mark.parametrize("day", [0, 1])
def test_object_of_the_same_day_or_a_later_one_replaces_nothing(world: World, day: int) -> None:
    (node,) = world.nodes
    world.pass_by(20)
    today = int(BEGIN_S) // 86400
    name = PagesName(b"n" * 16, 0, today, b"k" * 16)
    there = replace(name, day=today + day)
    world.store.put(NAMES.pages(there), bytes(1000))
    node.fleet.stored(name, 1000, there.day)
    world.pass_by(5000, step_s=100)
    assert NAMES.pages(there) in world.store.names()


@pytest.mark.parametrize("answer_is_lost", [False, True])
def test_call_that_fails_costs_time_and_nothing_else(
    rng: random.Random, answer_is_lost: bool
) -> None:
    """Each call of an hour and more, one after the other."""

    def life(fails_at: int | None) -> World:
        world = World(1, Settings(capacity_bytes=10**6))
        (node,) = world.nodes
        today = int(BEGIN_S) // 86400
        for day in (0, 9):
            name = PagesName(b"n" * 16, 0, today - day, b"k" * 16)
            world.store.put(NAMES.pages(name), bytes(1000))
        world.store.calls = 0
        world.store.after = answer_is_lost
        puts = 0

        def fails(number: int) -> bool:
            return number - puts == fails_at

        world.store.fails = fails
        for _ in range(300):
            world.pass_by(20, step_s=20)
            if len(node.put) < 5:
                calls = world.store.calls
                world.store.fails = lambda number: False
                node.puts(rng, 1000)
                world.store.fails = fails
                puts += world.store.calls - calls
        return world

    calls = life(None).store.calls
    assert calls > 100
    for number in [*range(1, 30), *rng.sample(range(30, calls - 30), 5)]:
        world = life(number)
        (node,) = world.nodes
        assert node.failures <= 1  # or done in another way
        facts = node.fleet.facts()
        assert (facts.used_bytes, facts.objects) == (6000, 6)
        assert len([name for name in world.store.names() if NAMES.pages_of(name)]) == 6
        assert set(world.told_keys()) <= {name.key for name in node.put}
        assert all(node.sink.has(name) for name in node.put)
        assert facts.listed_ago_s < 3700


def test_store_that_is_out_of_reach_leaves_what_is_known(rng: random.Random) -> None:
    world = World(2)
    for _ in range(5):
        world.pass_by(60)
    for node in world.nodes:
        assert node.puts(rng, 100)
    world.store.fails = lambda number: True
    world.pass_by(170)
    before = [node.fleet.facts() for node in world.nodes]
    assert [(facts.nodes, facts.used_bytes) for facts in before] == [(2, 100), (2, 100)]
    world.pass_by(20)  # others would soon count them as dead
    assert all(node.fleet.facts().listed_ago_s < 3600 for node in world.nodes)
    assert not any(node.fleet.admit(1) for node in world.nodes)
    world.pass_by(3600)
    assert [node.fleet.facts().used_bytes for node in world.nodes] == [100, 100]
    assert not any(node.fleet.admit(1) for node in world.nodes)
    world.store.fails = lambda number: False
    world.pass_by(700)
    assert [node.fleet.facts().used_bytes for node in world.nodes] == [200, 200]
    assert sorted(world.told_keys()) == sorted(n.key for node in world.nodes for n in node.put)


def test_five_nodes_of_a_fleet_stay_within_its_capacity(rng: random.Random) -> None:
    """For 30 hours: one of them dies and two join; two midnights pass, and the first day goes."""
    settings = Settings(capacity_bytes=300 << 20, ttl_days=1)
    world = World(5, settings, scale=1 << 20)
    most = 0
    for step in range(30 * 6):
        if step == 20:
            world.nodes.pop(1)
        if step in (50, 51):
            world.joins()
        for node in world.nodes:
            while rng.random() < 0.9 and node.puts(rng, rng.randrange(1, 4)):
                pass
        world.pass_by(600, step_s=120)
        used = world.pages_bytes()
        most = max(most, used)
        assert used <= settings.capacity_bytes
    assert most > 0.8 * settings.capacity_bytes
    days = {name.day for path in world.store.names() if (name := NAMES.pages_of(path))}
    assert min(days) >= int(world.now.now_s * 1000) // DAY_MS - settings.ttl_days
    assert sum(node.fleet.facts().deleted_objects for node in world.nodes) > 0
    assert {node.fleet.facts().nodes for node in world.nodes} == {6}


def test_what_a_node_puts_the_others_know_seconds_later() -> None:
    world = World(3)
    rng = random.Random(5)
    world.pass_by(300)
    assert world.nodes[0].puts(rng, 100)
    (name,) = world.nodes[0].put
    world.pass_by(15)
    assert all(node.sink.has(name) for node in world.nodes)
