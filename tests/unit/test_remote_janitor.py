"""What is deleted from a fleet's store, and what never is."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.errors import TransportError
from kvwarehouse.remote import sweep as rules
from kvwarehouse.remote.capacity import Capacity
from kvwarehouse.remote.janitor import Janitor
from kvwarehouse.remote.names import DAY_MAX, EVERYTHING, FleetNames, PagesName
from kvwarehouse.remote.nodes import BEAT_S, BELIEVED_AFTER, DAY_MS, Nodes, StoreClock
from kvwarehouse.remote.sweep import Sweep, SweepRules, days_too_many
from testkit.timed_store import HostClock, KeptPages, TimedStore

NAMES = FleetNames(bytes(range(16)))
OTHERS = FleetNames(bytes(16))
TODAY = 20785
NOW_MS = TODAY * DAY_MS + 12 * 3600 * 1000
TTL_DAYS = 3


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TimedStore:
    clock = HostClock(NOW_MS / 1000)
    return TimedStore(clock, "memory:///" if request.param == "memory" else f"file://{tmp_path}")


def page(rng: random.Random, day: int, space: int = 1, epoch: int = 0) -> PagesName:
    return PagesName(bytes([space]) * 16, epoch, day, rng.randbytes(16))


def put_old(store: TimedStore, names: list[str], age_s: float = 0.0) -> list[str]:
    store.clock.now_s -= age_s  # type: ignore[attr-defined]
    for name in names:
        store.put(name, b"four")
    store.clock.now_s += age_s  # type: ignore[attr-defined]
    return names


def swept(store: TimedStore, **settings: Any) -> Sweep:
    removed = settings.pop("removed", lambda names: None)
    sweep = Sweep(store, NAMES, SweepRules(NOW_MS, TTL_DAYS, **settings), removed)
    for _ in sweep.steps():
        pass
    return sweep


def test_days_that_are_over_go_and_the_others_stay(store: TimedStore, rng: random.Random) -> None:
    names = [
        page(rng, day, space, epoch)
        for day in range(TODAY - 10, TODAY + 3)
        for space in (1, 2)
        for epoch in (0, 7)
    ]
    put_old(store, [NAMES.pages(name) for name in names])
    gone: list[PagesName] = []
    sweep = swept(store, removed=gone.extend)
    assert store.names() == sorted(NAMES.pages(n) for n in names if n.day >= TODAY - TTL_DAYS)
    over = [name for name in names if name.day < TODAY - TTL_DAYS]
    assert sweep.swept.objects == {"pages": len(over)}
    assert sweep.swept.pages_bytes == 4 * len(over)
    assert sorted(map(NAMES.pages, gone)) == sorted(map(NAMES.pages, over))


def test_days_that_are_too_many_go_too(store: TimedStore, rng: random.Random) -> None:
    put_old(store, [NAMES.pages(page(rng, day)) for day in range(TODAY - 2, TODAY + 1)])
    swept(store, too_many={TODAY - 2})
    days = {name.day for path in store.names() if (name := NAMES.pages_of(path))}
    assert days == {TODAY - 1, TODAY}


def test_large_day_goes_in_batches(
    store: TimedStore, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "BATCH", 10)
    put_old(store, [NAMES.pages(page(rng, TODAY - 9)) for _ in range(101)])
    gone: list[int] = []
    swept(store, removed=lambda names: gone.append(len(names)))
    assert gone == [10] * 10 + [1]
    assert store.names() == []


def test_what_nodes_left_behind_goes_when_it_is_old(store: TimedStore) -> None:
    turn = NOW_MS // rules.TURN_MS
    old = [
        NAMES.delta(NOW_MS - rules.DELTA_MS - 1, 1),
        NAMES.turn(turn - 7),
        NAMES.turn(0),
        *put_old(store, [NAMES.node(1), f"{NAMES.probes_prefix}{1:016x}"], age_s=86401),
    ]
    put_old(store, old[:3])
    kept = [
        NAMES.delta(NOW_MS - rules.DELTA_MS, 1),
        NAMES.delta(NOW_MS + 10**9, 1),
        NAMES.turn(turn),
        NAMES.turn(turn - 5),
        *put_old(store, [NAMES.node(2)], age_s=86400),
        *put_old(store, [f"{NAMES.probes_prefix}{2:016x}"], age_s=3600),
    ]
    put_old(store, kept[:4])
    sweep = swept(store)
    assert store.names() == sorted(kept)
    assert sweep.swept.objects == {"deltas": 1, "nodes": 1, "turns": 2, "probes": 1}


def foreign_names(rng: random.Random) -> list[str]:
    """Old, and none of a name that is understood."""
    over = TODAY - 100
    name = page(rng, over)
    whole, others = NAMES.pages(name), OTHERS.pages(name)
    prefix = NAMES.pages_prefix(name.namespace, 0, over)
    return [
        others,
        OTHERS.node(1),
        OTHERS.delta(0, 1),
        OTHERS.turn(0),
        whole.replace("v1/", "v2/"),
        whole.replace("v1/", "v1/sub/"),
        f"{whole}.tmp",
        f"{prefix}README",
        f"{prefix}a0/b0{'0' * 30}",
        f"{prefix}a0/a0{'0' * 30}/x",
        whole.replace(f"/{over}/", f"/0{over}/"),
        whole.replace(f"/{over}/", f"/{DAY_MAX + 1}/"),
        f"{NAMES.root}readme",
        f"{NAMES.root}node/me",
        f"{NAMES.root}delta/1-1",
        f"{NAMES.root}janitor/0x1",
        f"{NAMES.root}janitor/{DAY_MAX + 1}",
        f"{NAMES.root}probe/x",
        f"{NAMES.root}backup/{over}/x",
        NAMES.epoch(name.namespace, 1),
        "data.bin",
    ]


def test_what_has_no_name_of_this_fleets_is_never_deleted(
    store: TimedStore, rng: random.Random
) -> None:
    foreign = foreign_names(rng)
    put_old(store, foreign, age_s=100 * 86400)
    put_old(store, [NAMES.pages(page(rng, TODAY - 100)) for _ in range(3)])
    swept(store, too_many=set(range(TODAY - 100, TODAY)))
    assert store.names() == sorted(foreign)


def test_dry_sweep_counts_and_deletes_nothing(store: TimedStore, rng: random.Random) -> None:
    put_old(store, [NAMES.pages(page(rng, TODAY - 9)), NAMES.delta(0, 1)])
    before = store.names()
    sweep = swept(store, dry=True, removed=lambda names: pytest.fail("nothing was removed"))
    assert store.names() == before
    assert sweep.swept.objects == {"pages": 1, "deltas": 1}


@pytest.mark.parametrize("answer_is_lost", [False, True])
def test_sweep_that_fails_anywhere_leaves_the_rest_to_the_next(
    rng: random.Random, answer_is_lost: bool
) -> None:
    def filled() -> TimedStore:
        store = TimedStore(HostClock(NOW_MS / 1000))
        made = [NAMES.pages(PagesName(b"n" * 16, 0, day, b"k" * 16)) for day in (1, 2, TODAY)]
        put_old(store, [*made, NAMES.delta(0, 1), NAMES.turn(1)])
        return store

    store = filled()
    before = store.calls
    swept(store)
    calls, left = store.calls - before, store.names()
    for number in range(1, calls + 1):
        store = filled()
        store.after = answer_is_lost
        begin = store.calls
        store.fails = lambda at, due=begin + number: at == due  # type: ignore[misc]
        with pytest.raises(TransportError):
            swept(store)
        swept(store)
        assert store.names() == left


def test_two_sweeps_at_a_time_do_no_harm(store: TimedStore, rng: random.Random) -> None:
    kept = [NAMES.pages(page(rng, TODAY - day)) for day in range(TTL_DAYS + 1)]
    over = [NAMES.pages(page(rng, TODAY - 9, space)) for space in (1, 2, 3) for _ in range(5)]
    put_old(store, [*kept, *over, NAMES.delta(0, 1)])
    sweeps = [Sweep(store, NAMES, SweepRules(NOW_MS, TTL_DAYS)) for _ in range(2)]
    steps = [sweep.steps() for sweep in sweeps]
    while steps:
        turn = rng.choice(steps)
        if next(turn, ...) is ...:
            steps.remove(turn)
    assert store.names() == sorted(kept)


@pytest.mark.parametrize(
    ("bytes_of_days", "gone"),
    [
        ({}, set()),
        ({0: 95}, set()),
        ({-1: 50, 0: 45}, set()),
        ({-1: 50, 0: 46}, {-1}),
        ({-2: 10, -1: 50, 0: 45}, {-2}),
        ({-2: 10, -1: 50, 0: 90}, {-2, -1}),
        ({-2: 10, -1: 50, 0: 96}, {-2, -1}),
        ({0: 200}, set()),  # today stays
        ({1: 200, 0: 1, -1: 1}, {-1}),
        ({-50: 1000, -1: 50, 0: 40}, set()),  # what is over goes anyway
    ],
)
def test_oldest_days_are_too_many_above_nearly_full(
    bytes_of_days: dict[int, int], gone: set[int]
) -> None:
    days = {TODAY + day: size_bytes for day, size_bytes in bytes_of_days.items()}
    assert days_too_many(days, TODAY, TTL_DAYS, 100) == {TODAY + day for day in gone}


class Host:
    def __init__(self, store: TimedStore, node: int, capacity_bytes: int = 1000) -> None:
        self.clock = HostClock()
        self.sink = KeptPages()
        store_clock = StoreClock(self.clock)
        self.nodes = Nodes(store, NAMES, node, store_clock, self.clock)
        self.capacity = Capacity(capacity_bytes, self.clock)
        self.janitor = Janitor(
            store, NAMES, self.nodes, self.capacity, TTL_DAYS, lambda names: None
        )


Made = tuple[TimedStore, list[Host], Callable[[float], None]]


@pytest.fixture
def hosts() -> Made:
    now = HostClock(NOW_MS / 1000)
    store = TimedStore(now)
    made = [Host(store, node) for node in (1, 2)]

    def goes(seconds: float) -> None:
        now.now_s += seconds
        for host in made:
            host.clock.now_s += seconds
            host.nodes.round()

    goes(0)
    made[0].clock.now_s += 60  # the first to come does not know the second yet
    made[0].nodes.round()
    return store, made, goes


def test_one_node_sweeps_in_each_turn(hosts: Made, rng: random.Random) -> None:
    store, (one, two), goes = hosts
    old = NAMES.pages(page(rng, TODAY - 9))
    store.put(old, b"x")
    two.janitor.round(put_if_absent=True)
    one.janitor.round(put_if_absent=True)
    assert (one.janitor.deleted_objects, two.janitor.deleted_objects) == (0, 1)
    store.put(old, b"x")
    two.janitor.round(put_if_absent=True)
    assert old in store.names()  # this turn has had its sweep
    goes(600)
    one.janitor.round(put_if_absent=True)
    two.janitor.round(put_if_absent=True)
    assert old not in store.names()
    assert (one.janitor.deleted_objects, two.janitor.deleted_objects) == (1, 1)


def test_nothing_is_deleted_while_the_stores_clock_is_doubted(
    hosts: Made, rng: random.Random
) -> None:
    store, (one, _), goes = hosts
    young = NAMES.pages(page(rng, TODAY))
    store.put(young, b"x")
    now: Any = store.clock
    now.now_s += 9 * 86400
    for _ in range(BELIEVED_AFTER - 1):
        goes(BEAT_S)
        one.janitor.round(put_if_absent=True)
    assert young in store.names()
    assert one.janitor.deleted_objects == 0
    goes(BEAT_S)
    one.janitor.round(put_if_absent=True)
    assert young not in store.names()


def test_smallest_living_node_sweeps_where_put_if_absent_is_not_heeded(
    hosts: Made, rng: random.Random
) -> None:
    store, (one, two), _ = hosts
    old = NAMES.pages(page(rng, TODAY - 9))
    store.put(old, b"x")
    two.janitor.round(put_if_absent=False)
    assert old in store.names()
    one.janitor.round(put_if_absent=False)
    assert old not in store.names()
    store.put(old, b"x")
    one.janitor.round(put_if_absent=False)
    assert old in store.names()  # this turn has had its sweep
    assert not any(NAMES.turn_of(name) for name in store.names())


def no_room(*unused: Any, **also: Any) -> bool:
    raise TransportError("put: 507 Insufficient Storage", code="remote_full")


def test_store_that_is_full_is_emptied_by_the_smallest_living_node(
    hosts: Made, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: nobody could take a turn in a full store, so nobody made room in it."""
    store, (one, two), _ = hosts
    old = NAMES.pages(page(rng, TODAY - 9))
    marker = NAMES.epoch(b"n" * 16, 1)
    put_old(store, [old, marker], age_s=TTL_DAYS * 86400)  # which would be written again
    monkeypatch.setattr(store, "put", no_room)
    two.janitor.round(put_if_absent=True)
    assert old in store.names()
    one.janitor.round(put_if_absent=True)
    assert old not in store.names()
    assert marker in store.names()


def test_turn_that_could_not_be_taken_is_not_tried_again(
    hosts: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (_, two), _ = hosts
    tried: list[str] = []

    def fails(name: str, *unused: Any, **also: Any) -> bool:
        tried.append(name)
        raise TransportError("put: 503", code="remote_failed")

    monkeypatch.setattr(store, "put", fails)
    for _ in range(5):
        two.janitor.round(put_if_absent=True)
    assert len(tried) == 1


def test_oldest_day_goes_once_where_the_store_is_nearly_full(
    hosts: Made, rng: random.Random
) -> None:
    store, (one, _), goes = hosts
    names = {day: NAMES.pages(page(rng, TODAY - day)) for day in range(3)}
    for name in names.values():
        store.put(name, bytes(330))
    one.capacity.listed({TODAY: 330, TODAY - 1: 330, TODAY - 2: 330}, one.clock.now_s)
    for _ in range(3):  # though it is not listed again
        one.janitor.round(put_if_absent=True)
        goes(600)
    assert sorted(n for n in store.names() if NAMES.pages_of(n)) == sorted([names[0], names[1]])
    assert one.capacity.used_bytes == 660


def test_sweep_gives_way_to_beats_and_goes_on_in_the_next_round(
    hosts: Made, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (one, _), _ = hosts
    monkeypatch.setattr(rules, "BATCH", 1)
    for _ in range(20):
        store.put(NAMES.pages(page(rng, TODAY - 9)), b"x")
    delete = store.delete

    def slow(names: list[str]) -> None:
        one.clock.now_s += 0.7
        delete(names)

    store.delete = slow  # type: ignore[method-assign, assignment]
    one.janitor.round(put_if_absent=True)
    assert one.janitor.deleted_objects == 3
    for _ in range(20):
        one.janitor.round(put_if_absent=True)
    assert one.janitor.deleted_objects == 20


def test_sweep_that_failed_is_begun_anew_in_the_next_turn(hosts: Made, rng: random.Random) -> None:
    store, (one, _), goes = hosts
    old = NAMES.pages(page(rng, TODAY - 9))
    store.put(old, b"x")
    delete = store.delete

    def failing(names: list[str]) -> None:
        raise TransportError("no", code="remote_failed")

    store.delete = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(TransportError):
        one.janitor.round(put_if_absent=True)
    store.delete = delete  # type: ignore[method-assign]
    one.janitor.round(put_if_absent=True)
    assert old in store.names()
    goes(600)
    one.janitor.round(put_if_absent=True)
    assert old not in store.names()
    assert one.janitor.deleted_objects == 1


HOUR_S = 3600
DAY_S = 24 * HOUR_S


def epoch_of(age_s: float) -> int:
    """Of a clear so long ago."""
    return (NOW_MS - int(age_s * 1000)) << 16


def mark(store: TimedStore, space: bytes, age_s: float) -> str:
    name = NAMES.epoch(space, epoch_of(age_s))
    put_old(store, [name], age_s)
    return name


@pytest.mark.parametrize("cleared", [bytes([1]) * 16, EVERYTHING])
def test_what_was_cleared_goes_an_hour_later(
    store: TimedStore, rng: random.Random, cleared: bytes
) -> None:
    marker = mark(store, cleared, 2 * HOUR_S)
    at = epoch_of(2 * HOUR_S)
    older = [page(rng, TODAY - day, epoch=epoch) for day in range(2) for epoch in (0, at - 1)]
    kept = [page(rng, TODAY, epoch=at)]
    kept += [page(rng, TODAY, space=2, epoch=0)] if cleared != EVERYTHING else []
    put_old(store, [NAMES.pages(name) for name in older + kept])
    assert swept(store, dry=True).swept.objects == {"pages": 4}
    assert swept(store).swept.objects == {"pages": 4}
    assert store.names() == sorted([marker, *map(NAMES.pages, kept)])


def test_what_was_cleared_lately_stays(store: TimedStore, rng: random.Random) -> None:
    mark(store, bytes([1]) * 16, HOUR_S - 1)
    put_old(store, [NAMES.pages(page(rng, TODAY))])
    assert swept(store).swept.objects == {}


def test_markers_below_others_go_a_day_later(store: TimedStore) -> None:
    space, other = bytes([1]) * 16, bytes([2]) * 16
    mark(store, space, 3 * DAY_S)
    mark(store, EVERYTHING, 2.5 * DAY_S)
    mark(store, EVERYTHING, 2 * DAY_S)
    kept = [mark(store, EVERYTHING, HOUR_S), mark(store, EVERYTHING, DAY_S - 1)]
    kept += [mark(store, other, 60), mark(store, space, 120)]
    assert swept(store, dry=True).swept.objects == {"markers": 3}
    assert swept(store).swept.objects == {"markers": 3}
    assert store.names() == sorted(kept)


def test_highest_markers_are_kept_young(store: TimedStore) -> None:
    """Else a rule of the store's by age takes them, and what they clear comes back."""
    space, other = bytes([1]) * 16, bytes([2]) * 16
    store.clock = HostClock(NOW_MS / 1000)
    old, young = mark(store, space, TTL_DAYS * DAY_S / 2 + 2), mark(store, other, DAY_S)

    def modified() -> dict[str, float]:
        return {item.name: item.modified_s for item in store.list(NAMES.epochs_prefix)}

    before = modified()
    swept(store, dry=True)
    assert modified() == before
    assert swept(store).swept.objects == {}
    assert modified() == {old: NOW_MS // 1000, young: before[young]}
