"""A worker's part of clears: what it lists, says and writes. What follows for hosts is in
test_clears_of_fleets.py."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.errors import TransportError
from kvwarehouse.remote import epochs as module
from kvwarehouse.remote.epochs import Epochs, list_markers
from kvwarehouse.remote.names import EVERYTHING, FleetNames
from kvwarehouse.remote.nodes import DAY_MS
from kvwarehouse.remote.report import (
    EPOCHS_END,
    EPOCHS_PER_LINE,
    LINE_BYTES_MAX,
    ClearTold,
    ClearWritten,
    EpochsFound,
    EpochsHeard,
    EpochsKnown,
)
from testkit.timed_store import HostClock, TimedStore

NAMES = FleetNames(bytes(range(16)))
SPACE, OTHER = b"s" * 16, b"o" * 16
NOW_MS = 1_700_000_000_000
NODE = 0xABCD_1234


class Rig:
    def __init__(self, url: str = "memory:///") -> None:
        self.clock = HostClock()
        self.store = TimedStore(HostClock(NOW_MS / 1000), url)
        self.store.put(NAMES.epochs_sentinel, b"-")  # as of a fleet that is not new
        self.said: list[Any] = []
        self.epochs = Epochs(NAMES, NODE, self.said.append, self.clock)
        self.heeds = True

    def round(self, now_ms: int | None = NOW_MS) -> list[Any]:
        """What it said in it."""
        before = len(self.said)
        self.epochs.round(self.store, now_ms, put_if_absent=self.heeds)
        return self.said[before:]

    def after(self, seconds: float) -> list[Any]:
        self.clock.now_s += seconds
        return self.round()

    def mark(self, space: bytes, epoch: int) -> None:
        self.store.put(NAMES.epoch(space, epoch), b"-")

    def markers(self, space: bytes = SPACE) -> list[int]:
        return [marker.epoch for marker in list_markers(self.store, NAMES).get(space, ())]

    def clear(self, clear_epoch: int = 1, space: bytes = SPACE) -> None:
        self.epochs.tell(ClearTold(space.hex(), clear_epoch))

    def hear(self) -> None:
        self.epochs.tell(EpochsHeard(self.said[-1].serial))


@pytest.fixture(params=["memory", "folder"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig("memory:///" if request.param == "memory" else f"file://{tmp_path}")


def test_all_epochs_are_said_at_first_and_then_what_has_changed(rig: Rig) -> None:
    rig.mark(SPACE, 7)
    rig.mark(SPACE, 5)
    rig.store.put(f"{NAMES.epochs_prefix}{SPACE.hex()}/not-one", b"-")
    rig.mark(OTHER, EPOCHS_END)  # which is none
    assert rig.round() == [EpochsFound(1, 0, {SPACE.hex(): 7})]
    assert rig.after(module.LIST_EVERY_S - 0.1) == []
    rig.mark(OTHER, 3)
    assert rig.after(0.1) == [EpochsFound(2, 0, {OTHER.hex(): 3})]
    calls = rig.store.calls
    assert rig.after(module.LIST_EVERY_S) == []
    assert rig.store.calls == calls + 1


def test_nothing_cleared_is_said_too(rig: Rig) -> None:
    assert rig.round() == [EpochsFound(1, 0, {})]


def test_epochs_are_fresh_while_they_were_listed_lately_and_heard(rig: Rig) -> None:
    assert not rig.epochs.is_fresh
    rig.round()
    assert not rig.epochs.is_fresh
    rig.hear()
    assert rig.epochs.is_fresh
    assert rig.epochs.fresh_until_s == rig.clock.now_s + module.FRESH_S
    rig.clock.now_s += module.FRESH_S - 0.1
    assert rig.epochs.is_fresh
    rig.clock.now_s += 0.1
    assert not rig.epochs.is_fresh
    rig.mark(SPACE, 7)
    rig.round()
    assert not rig.epochs.is_fresh  # the daemon does not know yet
    rig.hear()
    assert rig.epochs.is_fresh
    assert rig.epochs.listed_ago_s == 0


def test_listing_of_a_new_fleet_is_believed_once_it_has_the_sentinel(rig: Rig) -> None:
    rig.store.delete(rig.store.names())
    late = LateListing(rig, 3)
    for _ in range(3):
        with pytest.raises(TransportError, match="not believed"):
            rig.after(1)
        assert (rig.said, rig.epochs.is_fresh) == ([], False)
    late.late_s = 0
    assert rig.after(1) == [EpochsFound(1, 0, {})]
    assert rig.store.names() == [NAMES.epochs_sentinel]


def test_listing_is_as_old_as_its_beginning(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = rig.store.list

    def slowly(prefix: str, after: str = "") -> Any:
        found = list(listed(prefix, after))
        rig.clock.now_s += 4
        return iter(found)

    monkeypatch.setattr(rig.store, "list", slowly)
    rig.round()
    assert rig.epochs.listed_ago_s == 4


def test_store_that_fails_is_listed_again_soon(rig: Rig) -> None:
    rig.store.fails = lambda number: True
    with pytest.raises(TransportError):
        rig.round()
    assert rig.said == []
    rig.store.fails = lambda number: False
    assert rig.after(module.RETRY_S / 2) == []
    assert len(rig.after(module.RETRY_S / 2)) == 1


def test_clear_is_marked_above_what_there_is_by_the_stores_clock(rig: Rig) -> None:
    rig.mark(SPACE, 7)
    rig.clear(5)
    epoch = NOW_MS << 16 | 0x1234
    assert rig.epochs.owed == 1
    assert rig.round() == [
        ClearWritten(SPACE.hex(), epoch, 5, 7), EpochsFound(1, 0, {SPACE.hex(): epoch}),
    ]  # fmt: skip
    assert rig.markers() == [7, epoch]
    assert rig.epochs.owed == 0
    assert rig.after(1) == []


@pytest.mark.parametrize("now_ms", [None, NOW_MS])
def test_clear_is_above_a_marker_of_a_clock_ahead(rig: Rig, now_ms: int | None) -> None:
    ahead = (NOW_MS + DAY_MS) << 16 | 0xFFFF
    rig.mark(OTHER if now_ms else EVERYTHING, ahead)
    rig.mark(SPACE, ahead)
    rig.clear()
    (written, _) = rig.round(now_ms)
    assert written.epoch > ahead
    assert written.below == ahead


def test_clear_of_everything_is_above_all(rig: Rig) -> None:
    ahead = (NOW_MS + DAY_MS) << 16
    rig.mark(OTHER, ahead)
    rig.clear(space=EVERYTHING)
    (written, _) = rig.round()
    assert (written.namespace, written.below) == (EVERYTHING.hex(), ahead)
    assert rig.markers(EVERYTHING) == [written.epoch]
    rig.clear(2)
    (single, _) = rig.round(0)
    assert single.epoch > written.epoch
    assert single.below == written.epoch


def test_clear_that_fails_is_written_later(rig: Rig) -> None:
    rng = random.Random(1)
    rig.clear()
    rig.store.fails, rig.store.after = lambda number: rng.random() < 0.7, True
    for _ in range(100):
        try:
            rig.after(1)
        except TransportError:
            continue
    rig.store.fails = lambda number: False
    (written,) = [line for line in rig.said if isinstance(line, ClearWritten)]
    assert rig.epochs.owed == 0
    assert written.epoch == rig.markers()[-1]


def test_others_clears_are_said_though_ours_cannot_be_written(rig: Rig) -> None:
    rig.mark(OTHER, 3)
    put = rig.store.put

    def refused(name: str, data: Any, *, if_absent: bool = False) -> bool:
        raise TransportError("the bucket is full", code="remote_full")

    rig.store.put = refused  # type: ignore[method-assign]
    rig.clear()
    for serial, of_other in ((1, 3), (2, 4)):
        with pytest.raises(TransportError):
            rig.after(1)
        assert rig.said[-1] == EpochsFound(serial, 0, {OTHER.hex(): of_other})
        rig.hear()
        assert rig.epochs.is_fresh
        rig.store.put = put  # type: ignore[method-assign]
        rig.mark(OTHER, of_other + 1)
        rig.store.put = refused  # type: ignore[method-assign]
    assert rig.epochs.owed == 1


def test_marker_that_another_is_above_is_written_again(rig: Rig) -> None:
    put = rig.store.put

    def beaten(name: str, data: Any, *, if_absent: bool = False) -> bool:
        epoch = NAMES.epoch_of(name)
        assert epoch is not None
        put(NAMES.epoch(SPACE, epoch[1] + 1), b"-")
        return put(name, data, if_absent=if_absent)

    rig.store.put = beaten  # type: ignore[method-assign]
    rig.clear()
    said = rig.round()
    assert [type(line) for line in said] == [EpochsFound]
    assert rig.epochs.owed == 1
    rig.store.put = put  # type: ignore[method-assign]
    (written, _) = rig.round()
    assert written.epoch == rig.markers()[-1]
    assert written.below == rig.markers()[-2]


def test_number_that_another_host_takes_meanwhile_is_not_ours(rig: Rig) -> None:
    put = rig.store.put

    def taken(name: str, data: Any, *, if_absent: bool = False) -> bool:
        put(name, b"another's")
        return put(name, data, if_absent=if_absent)

    rig.store.put = taken  # type: ignore[method-assign]
    rig.clear()
    assert [type(line) for line in rig.round()] == [EpochsFound]
    assert rig.epochs.owed == 1


class LateListing:
    """A store whose listings have no object that is younger than `late_s`."""

    def __init__(self, rig: Rig, late_s: float) -> None:
        self.late_s = late_s
        self._rig, self._list, self._put = rig, rig.store.list, rig.store.put
        self._born: dict[str, float] = {}
        rig.store.list, rig.store.put = self.list, self.put  # type: ignore[method-assign]

    def put(self, name: str, data: Any, *, if_absent: bool = False) -> bool:
        self._born.setdefault(name, self._rig.clock.now_s)
        return self._put(name, data, if_absent=if_absent)

    def list(self, prefix: str, after: str = "") -> Any:
        now_s = self._rig.clock.now_s
        found = self._list(prefix, after)
        return (item for item in found if now_s - self._born.get(item.name, -1e9) >= self.late_s)


def goes_on(rig: Rig, rng: random.Random, seconds: float) -> list[Any]:
    """As the worker's thread: what it said. A store that fails is passed over."""
    before, until_s = len(rig.said), rig.clock.now_s + seconds
    while rig.clock.now_s < until_s:
        rig.clock.now_s += rng.uniform(0.2, 1.0)
        with contextlib.suppress(TransportError):
            rig.round(NOW_MS + int(1000 * rig.clock.now_s))
    return rig.said[before:]


def all_markers(rig: Rig) -> int:
    return sum(name.startswith(NAMES.epochs_prefix) for name in rig.store.names()) - 1  # sentinel


def test_clear_writes_one_marker_and_is_done_once_a_store_lists_it_that_lists_late(
    rig: Rig, rng: random.Random
) -> None:
    """A listing that lacked the marker had the next loop write another, each a clear of all hosts,
    until there were too many to list."""
    late = LateListing(rig, 60)
    rig.clear()
    said = goes_on(rig, rng, 59)
    assert [type(line) for line in said] == [EpochsFound]
    assert (rig.epochs.owed, all_markers(rig)) == (1, 1)
    late.late_s = 0
    written, found = goes_on(rig, rng, module.LIST_EVERY_S + 1)
    assert isinstance(written, ClearWritten)
    assert found.epochs == {SPACE.hex(): written.epoch}
    assert (rig.epochs.owed, rig.markers()) == (0, [written.epoch])


def test_marker_that_another_is_above_while_the_store_lists_late_is_written_once_more(
    rig: Rig, rng: random.Random
) -> None:
    late = LateListing(rig, 60)
    rig.clear()
    goes_on(rig, rng, 5)
    rig.mark(SPACE, others := EPOCHS_END >> 1)
    goes_on(rig, rng, 5)
    late.late_s = 0
    goes_on(rig, rng, 30)
    mine, of_other, again = rig.markers()
    assert mine < of_other == others < again
    (written,) = [line for line in rig.said if isinstance(line, ClearWritten)]
    assert (written.epoch, written.below, rig.epochs.owed) == (again, others, 0)


def test_marker_that_the_store_has_lost_is_put_again_and_has_no_second(
    rig: Rig, rng: random.Random
) -> None:
    puts: list[str] = []

    def lost(name: str, data: Any, *, if_absent: bool = False) -> bool:
        puts.append(name)
        return True

    put, rig.store.put = rig.store.put, lost  # type: ignore[method-assign]
    rig.clear()
    goes_on(rig, rng, 15 * module.LOST_AFTER_S - 60)
    assert len(puts) == 4  # after one, two and four times as long
    assert len(set(puts)) == 1
    rig.store.put = put  # type: ignore[method-assign]
    said = goes_on(rig, rng, 60 + 10 * module.LIST_EVERY_S)
    assert [type(line) for line in said] == [ClearWritten, EpochsFound]
    assert (all_markers(rig), rig.epochs.owed) == (1, 0)


@pytest.mark.parametrize("why", ["late", "full", "refused", "taken", "not listed"])
def test_clears_that_stay_owed_ask_the_store_about_as_often_as_none(
    rig: Rig, rng: random.Random, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def refused(name: str, data: Any, *, if_absent: bool = False) -> bool:
        rig.store.calls += 1
        if why == "taken":
            return False
        raise TransportError("the bucket is full", code="remote_full")

    rig.round()
    if why == "late":
        LateListing(rig, 3600)
    elif why == "full":
        monkeypatch.setattr(module, "NAMESPACES_MAX", module.SPARE)
    elif why == "not listed":
        rig.store.fails = lambda number: True
    else:
        rig.store.put = refused  # type: ignore[method-assign]
    for number in range(1, 6):
        rig.clear(space=bytes([number]) * 16)
    goes_on(rig, rng, 15)
    calls = rig.store.calls
    goes_on(rig, rng, 60)
    # A listing, a put, a listing; with a put for each of five where these are taken for another's.
    most = {"late": 1, "full": 1, "refused": 2, "taken": 7, "not listed": 5}[why]
    assert rig.store.calls - calls <= most * 60 / module.LIST_EVERY_S
    assert rig.epochs.owed == 5


def test_clear_that_is_told_waits_for_none_that_stays_owed(rig: Rig, rng: random.Random) -> None:
    rig.mark(SPACE, EPOCHS_END - 1)
    rig.clear()
    goes_on(rig, rng, 60)
    rig.clear(space=OTHER)
    assert isinstance(rig.round()[0], ClearWritten)


def test_clear_told_again_is_written_again(rig: Rig) -> None:
    rig.clear(1)
    rig.clear(2)
    (written, _) = rig.round()
    assert written.clear_epoch == 2
    rig.clear(3)
    (again, _) = rig.round()
    assert again.epoch > written.epoch


def test_clear_that_nothing_can_be_above_keeps_no_other_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    rig.mark(SPACE, EPOCHS_END - 1)
    rig.clear(1)
    for space in (OTHER, b"p" * 16):
        rig.clear(1, space)
    for left in (2, 1):  # one at a time, and none waits
        assert isinstance(rig.round()[0], ClearWritten)
        assert rig.epochs.owed == left


def test_what_the_daemon_knows_is_written_where_the_store_has_it_not(rig: Rig) -> None:
    rig.mark(OTHER, 9)
    rig.epochs.tell(EpochsKnown({SPACE.hex(): 7, OTHER.hex(): 5}))
    rig.round()
    assert (rig.markers(), rig.markers(OTHER)) == ([7], [9])
    rig.store.delete(rig.store.names())
    rig.after(module.LIST_EVERY_S)
    assert (rig.markers(), rig.markers(OTHER)) == ([7], [9])
    rig.store.delete(rig.store.names())
    rig.mark(EVERYTHING, 8)  # covers the one, and not the other
    rig.after(module.LIST_EVERY_S)
    assert (rig.markers(), rig.markers(OTHER)) == ([], [9])


def test_many_are_said_in_lines_of_one_listing(rig: Rig) -> None:
    spaces = [number.to_bytes(16, "big") for number in range(1, 2 * EPOCHS_PER_LINE + 2)]
    rig.epochs.tell(EpochsKnown({space.hex(): EPOCHS_END - 1 for space in spaces}))
    said = rig.round()
    assert [(line.serial, line.left, len(line.epochs)) for line in said] == [
        (1, 2, EPOCHS_PER_LINE), (1, 1, EPOCHS_PER_LINE), (1, 0, 1),
    ]  # fmt: skip
    assert all(len(line.to_line()) <= LINE_BYTES_MAX for line in said)


def test_too_many_markers_are_a_store_that_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MARKERS_MAX", 2)
    for number in range(3):
        rig.mark(bytes([number + 1]) * 16, 1)
    with pytest.raises(TransportError, match=f"below {NAMES.epochs_prefix}"):
        rig.round()
    assert not rig.epochs.is_fresh


def test_too_many_namespaces_are_a_store_that_fails_until_all_are_cleared(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NAMESPACES_MAX", 2)
    for number in range(3):
        rig.mark(bytes([number + 1]) * 16, 1)
    with pytest.raises(TransportError, match="clear --all"):
        rig.round()
    assert not rig.epochs.is_fresh
    rig.clear(space=EVERYTHING)
    written, found = rig.round()
    assert written.namespace == EVERYTHING.hex()
    assert found.epochs == {EVERYTHING.hex(): written.epoch}
    rig.hear()
    assert rig.epochs.is_fresh


def test_clear_of_all_is_said_before_what_was_cleared_after_it(rig: Rig) -> None:
    spaces = [bytes([1]) * 14 + number.to_bytes(2, "big") for number in range(EPOCHS_PER_LINE)]
    rig.epochs.tell(EpochsKnown({space.hex(): EPOCHS_END - 1 for space in spaces}))
    rig.epochs.tell(EpochsKnown({EVERYTHING.hex(): 5}))
    first, last = rig.round()
    assert first.epochs[EVERYTHING.hex()] == 5
    assert len(last.epochs) == 1


def test_full_fleet_takes_no_more_namespaces_and_still_a_clear_of_all(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NAMESPACES_MAX", 4)
    monkeypatch.setattr(module, "SPARE", 2)
    rig.mark(SPACE, 7)
    rig.mark(OTHER, 8)
    rig.round()
    rig.clear(space=b"n" * 16)
    rig.round()
    assert (rig.markers(b"n" * 16), rig.epochs.owed) == ([], 1)
    rig.clear(space=SPACE)  # which has its place
    rig.round()
    assert len(rig.markers(SPACE)) == 2
    rig.clear(clear_epoch=2, space=EVERYTHING)
    rig.round()
    assert len(rig.markers(EVERYTHING)) == 1
    rig.after(module.LIST_EVERY_S)
    assert (rig.markers(b"n" * 16), rig.epochs.owed) == ([], 0)  # it was for that one too
    rig.clear(clear_epoch=3, space=b"n" * 16)  # and there is room again
    rig.round()
    assert len(rig.markers(b"n" * 16)) == 1
