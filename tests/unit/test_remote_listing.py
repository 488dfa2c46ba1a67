"""The whole fleet's objects, listed by several threads into a filter that has bounds."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.errors import TransportError
from kvwarehouse.remote import listing as listing_rules
from kvwarehouse.remote import walk as walk_rules
from kvwarehouse.remote.listing import Listing
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.object_store import StoredObject
from kvwarehouse.remote.walk import Found, PagesWalk
from testkit.timed_store import HostClock, KeptPages, TimedStore

pytestmark = pytest.mark.usefixtures("listed_without_pauses")

NAMES = FleetNames(bytes(range(16)))
OTHERS = FleetNames(bytes(16))
TODAY = 20785
BOUND_S = 60.0


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TimedStore:
    clock = HostClock(TODAY * 86400.0)
    return TimedStore(clock, "memory:///" if request.param == "memory" else f"file://{tmp_path}")


def put_some(
    store: TimedStore, rng: random.Random, count: int, spaces: int = 3, days: int = 4
) -> list[PagesName]:
    made = []
    for _ in range(count):
        space = bytes([rng.randrange(spaces)]) * 16
        name = PagesName(space, rng.randrange(2), TODAY - rng.randrange(days), rng.randbytes(16))
        store.put(NAMES.pages(name), bytes(rng.randrange(1, 5)))
        made.append(name)
    return made


def put_foreign(store: TimedStore) -> list[str]:
    """What is beside a fleet's objects of pages."""
    whole = NAMES.pages_prefix(b"\1" * 16, 0, TODAY)
    foreign = [
        OTHERS.pages(PagesName(b"\1" * 16, 0, TODAY, b"k" * 16)),
        NAMES.node(1),
        NAMES.delta(1, 1),
        NAMES.epoch(b"\1" * 16, 1),
        f"{NAMES.root}README",
        f"{NAMES.root}backup/{TODAY}/x",
        f"{NAMES.pages_prefix(b'1' * 16)}x",
        "v1/else",
        f"{whole}a0/not-a-key",
        f"{whole}a0/b0" + "0" * 30,
    ]
    for name in foreign:
        store.put(name, b"theirs")
    return foreign


class Kept:
    def __init__(self) -> None:
        self.names: list[PagesName] = []
        self.bytes = 0
        self.longest = 0
        self._lock = threading.Lock()

    def __call__(self, found: Found) -> None:
        with self._lock:
            self.names += [name for name, _ in found]
            self.bytes += sum(size_bytes for _, size_bytes in found)
            self.longest = max(self.longest, len(found))


def walked(store: TimedStore, streams: int = walk_rules.STREAMS) -> tuple[PagesWalk, Kept]:
    kept = Kept()
    walk = PagesWalk(store, NAMES, kept, streams)
    walk.start()
    assert walk.join(BOUND_S)
    return walk, kept


def in_order(names: list[PagesName]) -> list[str]:
    return sorted(NAMES.pages(name) for name in names)


@pytest.mark.parametrize("streams", [1, 16])
def test_walk_finds_each_object_of_pages_once_and_no_other(
    store: TimedStore, rng: random.Random, streams: int
) -> None:
    made = put_some(store, rng, 300)
    put_foreign(store)
    walk, kept = walked(store, streams)
    assert walk.failure is None
    assert in_order(kept.names) == in_order(made)
    assert walk.unknown == 2
    assert kept.bytes == sum(len(store.read(NAMES.pages(name))) for name in made)


def test_large_day_is_listed_in_parts_and_each_object_is_told_once(
    store: TimedStore, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk_rules, "SPLIT", 50)
    monkeypatch.setattr(walk_rules, "BATCH", 2)
    made = put_some(store, rng, 600, spaces=1, days=1)
    put_foreign(store)
    before = store.calls
    walk, kept = walked(store)
    assert store.calls - before > 512  # two epochs, in 256 parts each
    assert in_order(kept.names) == in_order(made)
    assert kept.longest <= 2
    assert walk.unknown == 2


def test_walk_of_an_empty_store_ends(store: TimedStore) -> None:
    walk, kept = walked(store)
    assert (walk.failure, kept.names) == (None, [])


def test_walk_goes_through_where_single_calls_fail(store: TimedStore, rng: random.Random) -> None:
    """Incident: each walk of a large store had some call that failed, and began anew."""
    made = put_some(store, rng, 50)
    before = store.calls
    walked(store)
    calls = store.calls - before
    for number in range(1, calls + 1):
        begin = store.calls
        store.fails = lambda at, due=begin + number: at == due  # type: ignore[misc]
        walk, kept = walked(store)
        assert walk.failure is None
        assert in_order(kept.names) == in_order(made)
        assert store.calls - begin == calls + 1


def test_walk_ends_where_a_part_goes_on_to_fail(rng: random.Random) -> None:
    store = TimedStore(HostClock())
    put_some(store, rng, 50)
    before = store.calls
    walked(store, streams=1)
    calls = store.calls - before
    for number in range(1, calls + 1):
        begin = store.calls
        store.fails = lambda at, due=begin + number: at >= due  # type: ignore[misc]
        walk, _ = walked(store, streams=1)
        assert isinstance(walk.failure, TransportError)
        assert store.calls - begin == number + walk_rules.RETRIES


def test_walk_does_not_ask_again_where_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TimedStore(HostClock())
    asked: list[str] = []

    def refused(prefix: str) -> Any:
        asked.append(prefix)
        raise TransportError("list: 403", code="remote_refused", retryable=False)

    monkeypatch.setattr(store, "parts", refused)
    walk, _ = walked(store)
    assert walk.failure is not None
    assert len(asked) == 1


class CutListings:
    """Each listing fails after some objects, until one that begins behind its end."""

    def __init__(self, store: TimedStore, objects: int) -> None:
        self._list, self._objects = store.list, objects

    def __call__(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        number = 0
        for number, item in enumerate(self._list(prefix, after), 1):
            yield item
            if number == self._objects:
                raise TransportError("list: cut", code="remote_failed")


@pytest.mark.parametrize("split", [10, 1000])
def test_part_of_a_walk_goes_on_behind_its_last_object(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, split: int
) -> None:
    monkeypatch.setattr(walk_rules, "SPLIT", split)
    monkeypatch.setattr(walk_rules, "BATCH", 2)
    store = TimedStore(HostClock())
    made = put_some(store, rng, 1000, spaces=1, days=1)
    monkeypatch.setattr(store, "list", CutListings(store, 3))
    walk, kept = walked(store)
    assert walk.failure is None
    assert in_order(kept.names) == in_order(made)


def test_part_in_a_folder_that_fails_half_way_ends_the_walk(
    rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names come in no order, so that nobody knows what is left."""
    store = TimedStore(HostClock(), f"file://{tmp_path}")
    put_some(store, rng, 20, spaces=1, days=1)
    monkeypatch.setattr(store, "list", CutListings(store, 3))
    walk, _ = walked(store)
    assert isinstance(walk.failure, TransportError)


def test_pauses_of_a_walk_double(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TimedStore(HostClock())
    store.fails = lambda number: True
    walk = PagesWalk(store, NAMES, Kept(), streams=1)
    waited: list[float] = []
    monkeypatch.setattr(walk_rules, "FIRST_PAUSE_S", 1.0)
    wait_for = walk._changed.wait_for

    def wait(is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            return wait_for(is_so)
        waited.append(timeout_s)
        return is_so()

    monkeypatch.setattr(walk._changed, "wait_for", wait)
    walk.start()
    assert walk.join(BOUND_S)
    assert waited == [1.0, 2.0, 4.0]


def test_walk_that_is_stopped_in_a_pause_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk_rules, "FIRST_PAUSE_S", 3600.0)
    store, asked = TimedStore(HostClock()), threading.Event()

    def fails(number: int) -> bool:
        asked.set()
        return True

    store.fails = fails
    walk = PagesWalk(store, NAMES, Kept())
    walk.start()
    assert asked.wait(BOUND_S)
    walk.stop()
    assert walk.join(BOUND_S)
    assert walk.failure is None


def test_walk_that_is_stopped_ends_early(rng: random.Random) -> None:
    store = TimedStore(HostClock())
    put_some(store, rng, 50)
    asked, goes_on = threading.Event(), threading.Event()
    parts = store.parts

    def slow(prefix: str) -> Any:
        asked.set()
        assert goes_on.wait(BOUND_S)
        return parts(prefix)

    store.parts = slow  # type: ignore[method-assign]
    kept = Kept()
    walk = PagesWalk(store, NAMES, kept)
    walk.start()
    assert asked.wait(BOUND_S)
    walk.stop()
    goes_on.set()
    assert walk.join(BOUND_S)
    assert (walk.failure, kept.names) == (None, [])


Made = tuple[Listing, KeptPages, HostClock]


@pytest.fixture
def made(store: TimedStore) -> Made:
    clock, sink = HostClock(), KeptPages(today=TODAY)
    store.put(NAMES.node(1), b"")
    return Listing(store, NAMES, sink, clock), sink, clock


def ended(listing: Listing) -> Any:
    listing.begin()
    assert listing.join(BOUND_S)
    return listing.end()


def test_listing_fills_the_filter_and_counts_days_and_namespaces(
    store: TimedStore, made: Made, rng: random.Random
) -> None:
    listing, sink, _ = made
    names = put_some(store, rng, 300)
    tomorrow = PagesName(b"\1" * 16, 0, TODAY + 1, b"t" * 16)
    store.put(NAMES.pages(tomorrow), b"12345")
    assert listing.is_due
    totals = ended(listing)
    assert all(sink.has(name) for name in names)
    assert not sink.has(tomorrow)
    assert totals.whole().objects == 301
    by_day = totals.by_day()
    assert list(by_day) == sorted({name.day for name in names} | {TODAY + 1})
    for day, total in by_day.items():
        paths = [NAMES.pages(name) for name in [*names, tomorrow] if name.day == day]
        assert (total.objects, total.bytes) == (len(paths), sum(len(store.read(p)) for p in paths))
    spaces = totals.by_namespace()
    assert sum(t.bytes for days in spaces.values() for t in days.values()) == totals.whole().bytes
    assert set(spaces) == {name.namespace for name in names}


def test_listing_is_due_again_an_hour_after_it_began(made: Made) -> None:
    listing, _, clock = made
    assert listing.listed_ago_s is None
    assert ended(listing) is not None
    assert listing.end() is None
    clock.now_s += listing_rules.INTERVAL_S - 1
    assert not listing.is_due
    assert listing.listed_ago_s == listing_rules.INTERVAL_S - 1
    clock.now_s += 1
    assert listing.is_due


def test_listing_that_fails_keeps_what_it_found_and_waits_longer_each_time(
    store: TimedStore, made: Made, rng: random.Random
) -> None:
    listing, sink, clock = made
    first = put_some(store, rng, 100)
    assert ended(listing) is not None
    wait_s = listing_rules.RETRY_S
    for _ in range(8):
        store.fails = lambda at: True
        with pytest.raises(TransportError):
            ended(listing)
        assert listing.end() is None
        assert all(sink.has(name) for name in first)
        clock.now_s += wait_s - 1
        assert not listing.is_due
        clock.now_s += 1
        assert listing.is_due
        wait_s = min(2 * wait_s, listing_rules.RETRY_MAX_S)
    store.fails = lambda at: False
    second = put_some(store, rng, 100)
    assert ended(listing).whole().objects == 200
    assert all(sink.has(name) for name in second)
    store.fails = lambda at: True
    with pytest.raises(TransportError):
        ended(listing)
    clock.now_s += listing_rules.RETRY_S
    assert listing.is_due
