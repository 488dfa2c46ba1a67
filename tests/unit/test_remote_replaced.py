"""Objects that a later day's have replaced: deleted after a while, in bounded calls."""

from __future__ import annotations

import pytest

from kvwarehouse.errors import TransportError
from kvwarehouse.remote import replaced as rules
from kvwarehouse.remote.replaced import ReplacedObjects
from testkit.timed_store import HostClock, TimedStore


class Rig:
    def __init__(self, objects: int) -> None:
        self.clock = HostClock()
        self.store = TimedStore(self.clock)
        self.replaced = ReplacedObjects(self.store, self.clock)
        for number in range(objects):
            self.store.put(f"v1/{number}", b"x")
            self.replaced.add(f"v1/{number}")
        self.store.calls = 0


def test_replaced_objects_go_when_their_time_has_come_and_not_before() -> None:
    rig = Rig(1)
    rig.clock.now_s += rules.AFTER_S - 1
    rig.store.put("v1/late", b"x")
    rig.replaced.add("v1/late")
    rig.replaced.round()
    assert rig.store.names() == ["v1/0", "v1/late"]
    rig.clock.now_s += 1
    rig.replaced.round()
    assert (rig.store.names(), rig.replaced.deleted) == (["v1/late"], 1)
    rig.clock.now_s += rules.AFTER_S
    rig.replaced.round()
    assert (rig.store.names(), rig.replaced.deleted) == ([], 2)


def test_replaced_objects_go_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "BATCH", 3)
    rig = Rig(7)
    rig.clock.now_s += rules.AFTER_S
    for left in (4, 1, 0, 0):
        rig.replaced.round()
        assert len(rig.store.names()) == left
    assert rig.store.calls == 3


def test_deleting_that_fails_is_done_again() -> None:
    rig = Rig(2)
    rig.clock.now_s += rules.AFTER_S
    rig.store.fails = lambda number: number == 1
    with pytest.raises(TransportError):
        rig.replaced.round()
    assert (len(rig.store.names()), rig.replaced.deleted) == (2, 0)
    rig.replaced.round()
    assert (rig.store.names(), rig.replaced.deleted) == ([], 2)


def test_what_waits_to_be_deleted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "WAITING_MAX", 3)
    rig = Rig(5)
    rig.clock.now_s += rules.AFTER_S
    rig.replaced.round()
    assert rig.store.names() == ["v1/3", "v1/4"]  # they go with their day
