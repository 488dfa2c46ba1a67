"""The sample of a survey is of all objects alike, and none is judged by what it says of itself."""

from __future__ import annotations

import random
from collections import Counter

from kvwarehouse.fleet import FleetSecret
from kvwarehouse.remote.names import FleetNames
from kvwarehouse.remote.survey import Survey
from testkit.remote_objects import made_object
from testkit.timed_store import HostClock, TimedStore

SECRET = FleetSecret.derive(bytes(32))
NAMES = FleetNames(SECRET.fleet_id)


def filled(rng: random.Random, count: int) -> TimedStore:
    store = TimedStore(HostClock())
    for _ in range(count):
        name, data = made_object(SECRET, b"n" * 16, 20785, rng, page_tokens=256, page_bytes=10)
        store.put(NAMES.pages(name), data)
    return store


def surveyed(store: TimedStore, sample: int, rng: random.Random) -> Survey:
    survey = Survey(store, NAMES, SECRET, sample, rng)
    for _ in survey.count():
        pass
    return survey


def test_each_object_is_as_likely_in_the_sample_as_any_other(rng: random.Random) -> None:
    store = filled(rng, 20)
    drawn: Counter[bytes] = Counter()
    for _ in range(200):
        judged = list(surveyed(store, 5, rng).verify())
        assert len({each.name for each in judged}) == 5
        drawn.update(each.name.key for each in judged)
    # 50 of each, with a standard deviation of 6.
    assert len(drawn) == 20
    assert all(10 < count < 90 for count in drawn.values())


def test_object_that_is_deleted_meanwhile_is_no_damage(rng: random.Random) -> None:
    store = filled(rng, 3)
    survey = surveyed(store, 3, rng)
    gone = store.names()[1]
    store.delete([gone])
    judged = {NAMES.pages(each.name): each for each in survey.verify()}
    assert judged[gone].fault == "gone"
    assert not judged[gone].is_damaged
    assert sorted(each.fault for each in judged.values()) == ["", "", "gone"]
    assert survey.totals.whole().objects == 3
