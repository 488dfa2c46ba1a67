"""What looks after clears over hosts, as a thread; and its file. What it decides is in
test_clears_of_fleets.py."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.daemon import remote_clears, remote_clears_file
from kvwarehouse.daemon.disk_calls import DiskCalls
from kvwarehouse.daemon.remote_clears import RemoteClears
from kvwarehouse.daemon.remote_clears_file import Applied, ClearsState
from kvwarehouse.errors import InternalError, StorageError, TransportError
from kvwarehouse.remote.names import EVERYTHING
from kvwarehouse.remote.report import (
    ClearTold,
    ClearWritten,
    EpochsFound,
    EpochsHeard,
    EpochsKnown,
    ToWorker,
)
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from testkit import fleet_hosts
from testkit.fleet_hosts import Host
from testkit.timed_store import HostClock, TimedStore

SPACE = fleet_hosts.space(0)
ID = b"w" * 16
NAME, OTHER = b"n" * 16, b"o" * 16
STATE = ClearsState({NAME: Applied(7, 3), OTHER: Applied(0, 0)}, {OTHER: 5, EVERYTHING: 6}, 2)


class Rig:
    """A daemon's part with its thread; the test is the worker."""

    def __init__(self, folder: Path) -> None:
        clock = HostClock()
        self.host = Host(folder, 1, TimedStore(clock), clock, iter(range(1, 100)))
        self.clears: RemoteClears = self.host.clears
        self.told: list[ToWorker] = []
        self.answers = True
        self.listens = True
        self.host.warehouse.open_namespace(SPACE)
        self.clears.start(self.host.core, self.host.warehouse)

    def tell(self, line: ToWorker) -> bool:
        answers = self.answers  # first: a test that has seen the line may have it change
        self.told.append(line)
        if isinstance(line, ClearTold) and answers:
            written = ClearWritten(line.namespace, 100 + line.clear_epoch, line.clear_epoch, 0)
            threading.Thread(target=self.clears.heard, args=(1, written)).start()
        return self.listens

    def attach(self, number: int = 1) -> None:
        self.clears.begin(number)
        self.clears.attach(self.tell)

    def list(self, serial: int = 1, number: int = 1, **epochs: int) -> None:
        self.clears.heard(number, EpochsFound(serial, 0, epochs))

    def clear(self, within_s: float = 60.0) -> str:
        record = self.host.ledger.find(SPACE.id)
        return str(self.host.warehouse.clear(record, remote_within_s=within_s).remote)

    @property
    def epoch(self) -> int | None:
        space = self.host.core.space(SPACE.id)
        assert space is not None
        return space.remote_epoch


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    fleet_hosts.patch(monkeypatch)
    monkeypatch.setattr(remote_clears, "RETRY_S", 0.01)
    monkeypatch.setattr(remote_clears, "STOPS_WITHIN_S", DEADLINE_S)  # on a machine that is busy
    made = Rig(tmp_path / "host")
    yield made
    made.clears.stop()
    assert not made.clears._thread.is_alive()
    made.host.ledger.close()


def test_objects_are_put_at_once_and_read_when_the_fleets_clears_are_listed(rig: Rig) -> None:
    eventually(lambda: rig.epoch == 0, "what is stored is put")
    rig.attach()
    assert rig.told == []
    rig.list(**{SPACE.id.hex(): 9})
    eventually(lambda: rig.told == [EpochsHeard(1)], "the worker may read")
    eventually(lambda: rig.epoch == 9, "of what the fleet has now")


def test_clear_waits_for_the_store_and_says_done(rig: Rig) -> None:
    rig.attach()
    rig.list()
    eventually(lambda: rig.epoch == 0, "it is served")
    assert rig.clear() == "done"
    eventually(lambda: rig.epoch == 101, "it is served again")
    assert ClearTold(SPACE.id.hex(), 1) in rig.told
    assert rig.clears.owed == 0


def test_clear_says_owed_where_there_is_no_worker_or_it_does_not_answer(rig: Rig) -> None:
    assert rig.clear() == "owed"
    rig.answers = False
    rig.attach()
    assert rig.clear(0.01) == "owed"
    assert rig.clears.owed == 1
    rig.answers = True
    rig.attach()
    eventually(lambda: rig.clears.owed == 0, "the next worker is told")


def test_clear_that_waits_is_not_done_by_a_clear_of_all_that_is_not(rig: Rig) -> None:
    rig.answers = False
    rig.attach()
    results: list[str] = []
    first = threading.Thread(target=lambda: results.append(rig.clear(0.5)))
    first.start()
    eventually(lambda: rig.clears.is_owed(SPACE.id), "the first waits")
    assert rig.host.warehouse.clear(None, remote_within_s=0.01).remote == "owed"
    first.join()
    assert results == ["owed"]


def test_clear_of_all_is_told_though_clears_of_many_have_no_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`clear --all`, which always makes room, was not told of while a full fleet took none of those
    before it."""
    monkeypatch.setattr(remote_clears, "_TOLD_MAX", 2)
    warehouse, ledger = rig.host.warehouse, rig.host.ledger
    rig.answers = False
    rig.attach()
    for number in range(1, 5):
        space = fleet_hosts.space(number)
        warehouse.open_namespace(space)
        assert warehouse.clear(ledger.find(space.id), remote_within_s=0).remote == "owed"
    eventually(lambda: len(rig.told) == 2, "as many are told as may wait")
    rig.answers = True
    assert warehouse.clear(None, remote_within_s=DEADLINE_S).remote == "done"
    assert [type(line) for line in rig.told] == 3 * [ClearTold]
    assert rig.clears.owed == 0


def test_answer_to_what_is_owed_no_more_takes_no_others_place(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_clears, "_TOLD_MAX", 1)
    rig.attach()
    rig.answers = False
    assert rig.clear(0.01) == "owed"
    eventually(lambda: rig.told == [ClearTold(SPACE.id.hex(), 1)], "the first is told")
    assert rig.host.warehouse.clear(None, remote_within_s=0).remote == "owed"
    all_of_it = rig.host.ledger.epoch
    eventually(lambda: rig.told[-1] == ClearTold(EVERYTHING.hex(), all_of_it), "it is told")
    with rig.clears._change:
        for _ in range(3):
            rig.clears.heard(1, ClearWritten(SPACE.id.hex(), 50, 1, 0))
        rig.clears.heard(1, ClearWritten(EVERYTHING.hex(), 51, all_of_it, 0))
    eventually(lambda: rig.clears.owed == 0, "it is done")


def test_worker_is_told_what_is_known_before_what_is_owed(rig: Rig) -> None:
    rig.attach()
    rig.list(**{SPACE.id.hex(): 50})
    eventually(lambda: rig.epoch == 50, "it follows")
    rig.clears.detach()
    rig.clear()
    rig.told.clear()
    rig.answers = False
    rig.attach()
    eventually(lambda: len(rig.told) == 2, "it is told")
    assert rig.told == [EpochsKnown({SPACE.id.hex(): 50}), ClearTold(SPACE.id.hex(), 2)]


def test_worker_that_does_not_listen_is_not_told_on(rig: Rig) -> None:
    rig.listens = rig.answers = False
    rig.attach()
    assert rig.clear(0.01) == "owed"
    rig.listens = rig.answers = True
    rig.attach()
    eventually(lambda: rig.clears.owed == 0, "the next one is")


def test_what_an_earlier_worker_says_is_not_heard(rig: Rig) -> None:
    rig.attach(2)
    rig.list(number=1, **{SPACE.id.hex(): 9})
    rig.list(number=2, **{SPACE.id.hex(): 8})
    eventually(lambda: rig.epoch == 8, "what this one says is")


def test_part_of_a_listing_is_none(rig: Rig) -> None:
    rig.attach()
    rig.clears.heard(1, EpochsFound(1, 1, {SPACE.id.hex(): 9}))
    eventually(lambda: rig.epoch == 9, "what it says is heeded")
    assert rig.told == []


def test_epochs_of_too_many_namespaces_end_the_worker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_clears, "LISTED_MAX", 2)
    rig.attach()
    with pytest.raises(InternalError):
        rig.list(**{f"{number:032x}": 1 for number in range(1, 4)})


def test_clear_of_all_makes_room_for_other_namespaces(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_clears, "LISTED_MAX", 2)
    rig.attach()
    rig.list(**{f"{number:032x}": 1 for number in range(1, 3)})
    rig.list(2, **{EVERYTHING.hex(): 2})
    rig.list(3, **{f"{3:032x}": 3})


def test_core_that_does_not_answer_is_asked_again(rig: Rig) -> None:
    rig.attach()
    eventually(lambda: rig.epoch == 0, "what was there from the start is served")
    set_epoch, calls = rig.host.core.set_remote_epoch, []

    def fails(*args: Any) -> bool:
        calls.append(args)
        if len(calls) < 4:
            raise TransportError("the core did not answer", code="no_answer")
        return bool(set_epoch(*args))

    rig.host.core.set_remote_epoch = fails  # type: ignore[assignment,method-assign]
    rig.list(**{SPACE.id.hex(): 9})
    eventually(lambda: rig.epoch == 9, "it is served in the end")
    assert rig.host.log.getvalue().count('"core_unresponsive"') == 1


def test_clear_that_the_core_missed_reaches_it_before_it_serves(rig: Rig) -> None:
    rig.host.compute(SPACE.id)
    clear = rig.host.core.clear

    def fails(*args: Any) -> int:
        raise TransportError("the core did not answer", code="no_answer")

    rig.host.core.clear = fails  # type: ignore[assignment,method-assign]
    rig.attach()
    rig.list()
    with pytest.raises(TransportError):
        rig.clear()
    rig.host.core.clear = clear  # type: ignore[method-assign]
    eventually(lambda: rig.epoch == 101, "it is served")
    assert rig.host.own(SPACE.id) == []


def test_what_others_have_cleared_is_heard_when_it_is_gone_here(rig: Rig) -> None:
    rig.host.compute(SPACE.id)
    clear, calls = rig.host.core.clear, []
    found: list[list[int]] = []

    def fails_first(ordinals: Any, epoch: int) -> int:
        calls.append(epoch)
        if len(calls) == 1:
            raise TransportError("the core did not answer", code="no_answer")
        return clear(ordinals, epoch)

    def tell(line: ToWorker) -> bool:
        if isinstance(line, EpochsHeard):
            found.append(rig.host.own(SPACE.id))
        return True

    rig.host.core.clear = fails_first  # type: ignore[assignment,method-assign]
    rig.clears.begin(1)
    rig.clears.attach(tell)
    rig.list(**{SPACE.id.hex(): 9})
    eventually(lambda: rig.epoch == 9, "it follows")
    assert found == [[]]


def test_what_others_have_cleared_waits_for_no_eviction(rig: Rig) -> None:
    rig.host.compute(SPACE.id)
    rig.attach()
    evicts, may_end = threading.Event(), threading.Event()

    def evict(*args: Any) -> tuple[int, list[Any]]:
        evicts.set()
        assert may_end.wait(DEADLINE_S)
        return 0, []

    rig.host.core.evict = evict  # type: ignore[attr-defined]
    record = rig.host.ledger.find(SPACE.id)
    evicting = threading.Thread(target=rig.host.warehouse.evict, args=(record, 1, "dram"))
    evicting.start()
    try:
        assert evicts.wait(DEADLINE_S)
        rig.list(**{SPACE.id.hex(): 9})
        eventually(lambda: rig.epoch == 9, "it follows", deadline_s=DEADLINE_S / 4)
        assert rig.host.own(SPACE.id) == []
    finally:
        may_end.set()
        evicting.join(DEADLINE_S)


def test_clear_that_neither_store_nor_disk_has_is_an_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: str, data: bytes) -> None:
        raise OSError("no room")

    monkeypatch.setattr(remote_clears_file, "write_atomic", refuses)
    with pytest.raises(StorageError) as caught:
        rig.clear()
    assert caught.value.code == "clear_not_durable"
    assert rig.host.log.getvalue().count("remote_clears_unsaved") == 1
    rig.attach()
    assert rig.clear() == "done"  # the store has it


def test_no_namespace_is_forgotten_while_too_many_are_owed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_clears, "OWED_MAX", 1)
    rig.clear()
    rig.host.warehouse.clear(None, forget=True)
    assert rig.host.ledger.find(SPACE.id) is not None


def test_bug_is_said_and_no_listing_is_heard_any_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.clears, "_stale", lambda: 1 / 0)
    rig.attach()
    rig.list()
    eventually(lambda: "remote_stopped" in rig.host.log.getvalue(), "it is said")
    assert rig.told == []
    assert rig.clears.failed.startswith("ZeroDivisionError")


# --- the file


def write(places: list[str], warehouse_id: bytes, state: ClearsState) -> str:
    disks = {place: DiskCalls(DEADLINE_S) for place in places}
    return remote_clears_file.write(disks, warehouse_id, state)


def test_file_keeps_what_is_known(tmp_path: Path) -> None:
    places = [str(tmp_path)]
    assert remote_clears_file.read(places, ID) == (None, [])
    assert write(places, ID, STATE) == ""
    assert remote_clears_file.read(places, ID) == (STATE, [])
    assert (tmp_path / "remote_clears").stat().st_mode & 0o777 == 0o600


def test_all_that_any_directory_knows_holds(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    older = ClearsState({NAME: Applied(8, 2), OTHER: Applied(1, 1)}, {OTHER: 4}, 1)
    write([str(one)], ID, older)
    write([str(two)], ID, STATE)
    state, damaged = remote_clears_file.read([str(one), str(two)], ID)
    assert (state, damaged) == (
        ClearsState({NAME: Applied(7, 3), OTHER: Applied(1, 1)}, {OTHER: 5, EVERYTHING: 6}, 2), [],
    )  # fmt: skip


def test_no_damage_is_believed_and_the_file_is_set_aside(tmp_path: Path) -> None:
    places, path = [str(tmp_path)], tmp_path / "remote_clears"
    write(places, ID, STATE)
    good = path.read_bytes()
    for at in range(0, len(good), 7):
        bad = bytearray(good)
        bad[at] ^= 1
        path.write_bytes(bad)
        state, damaged = remote_clears_file.read(places, ID)
        # What means the same is the same.
        assert (state, len(damaged)) in ((None, 1), (STATE, 0)), bytes(bad)
    for bad_file in (b"", b"[]", b"[" * 100_000, good[:-1], b"7", b'{"check": 1}', b"\xff"):
        path.write_bytes(bad_file)
        state, (damage,) = remote_clears_file.read(places, ID)
        assert state is None
        assert Path(damage.kept).read_bytes() == bad_file
        assert not path.exists()


def test_file_of_another_warehouse_says_nothing(tmp_path: Path) -> None:
    write([str(tmp_path)], b"x" * 16, STATE)
    state, (damage,) = remote_clears_file.read([str(tmp_path)], ID)
    assert state is None
    assert "warehouse" in damage.reason


def test_file_of_a_newer_version_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "remote_clears"
    write([str(tmp_path)], ID, STATE)
    values = json.loads(path.read_bytes())
    del values["check"]
    values["version"] = 2
    check = remote_clears_file._checksum(values)
    path.write_text(json.dumps({**values, "check": check}))
    with pytest.raises(StorageError) as caught:
        remote_clears_file.read([str(tmp_path)], ID)
    assert caught.value.code == "newer_remote_clears"
    assert path.exists()


def test_write_says_why_it_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert "No such file" in write([missing, str(tmp_path)], ID, STATE)
    assert remote_clears_file.read([str(tmp_path)], ID) == (STATE, [])
