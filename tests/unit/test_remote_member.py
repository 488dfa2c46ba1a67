"""A host in its fleet's store: opened, gone round in, reported. Over a folder; the filter and what
packs are doubles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import obstore
import pytest

from kvwarehouse.errors import TransportError
from kvwarehouse.remote import breaker, epochs, nodes, store_gate, store_member
from kvwarehouse.remote.breaker import Breaker
from kvwarehouse.remote.epochs import Epochs
from kvwarehouse.remote.gets import GetEnded
from kvwarehouse.remote.names import FleetNames, PagesName
from kvwarehouse.remote.report import (
    EpochsFound,
    EpochsHeard,
    FromWorker,
    WorkerReport,
    WorkerSettings,
)
from kvwarehouse.remote.store_member import StoreMember
from testkit.timed_store import HostClock, KeptPages

pytestmark = pytest.mark.usefixtures("listed_without_pauses")

FLEET = bytes(range(16))
DATA = bytes(1000)


@dataclass
class Run:
    key: bytes
    namespace_id: bytes = b"s" * 16
    epoch: int = 0
    day: int | None = None
    bytes: int = len(DATA)


class Packed(bytes):
    reason = ""


@dataclass
class RunToGet:
    key: bytes
    day: int
    namespace_id: bytes = b"s" * 16
    epoch: int = 0
    begin: int = 0
    end: int = len(DATA)
    within_s: float = 60.0


@dataclass
class Filled:
    end: str = "filled"
    pages: int = 4
    fault: str = ""


class File(KeptPages):
    """As core.PresenceFile is made."""

    def __init__(self, path: str, fleet: bytes, objects: int, days: int, today: int) -> None:
        super().__init__(days, today)
        self.made = path, fleet, objects, days


class Rig:
    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, self.clock = folder, HostClock()
        self.settings = WorkerSettings(
            link_fd=0, get_link_fd=0, socket="", presence_path="/presence", fleet_id=FLEET.hex(),
            node=7, url=f"file://{folder}", endpoint="", region="", ca_file="", connect_s=1.0,
            get_deadline_s=60.0, put_deadline_s=60.0, puts=1, gets=1, read=True,
            write_bytes_per_s=0, write="reused",
            capacity_bytes=1 << 30, ttl_days=3, objects=1000,
        )  # fmt: skip
        self.settings = replace(self.settings, **changes)
        self.filled: list[bytes] = []
        self.said: list[FromWorker] = []
        self.member = StoreMember(
            self.settings, lambda run: Packed(DATA), self._fill, self.clock, say=self.said.append
        )

    def _fill(self, run: Any, body: Any, within_s: float) -> Any:
        self.filled.append(bytes(body))
        return Filled()

    def open(self) -> None:
        def unexpected(wait_s: float) -> None:
            raise AssertionError(self.member.report().reason)

        self.member.open(unexpected)
        opened = self.member._opened
        assert opened is not None
        self.opened = opened
        self.opened.store.breaker = Breaker(self.clock)
        self.opened.store.list_breaker = Breaker(self.clock)

    def rounds(self, seconds: float) -> None:
        """As many as its threads go in that time, with what they begin; the daemon acts upon what
        it hears of clears."""
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.member.round()
            assert self.opened.fleet.join_listing(60)
            self.member.round_epochs()
            for line in self.said:
                if isinstance(line, EpochsFound):
                    self.member.epochs.tell(EpochsHeard(line.serial))
            self.clock.now_s += 5

    def serve(self) -> None:
        self.open()
        self.rounds(3 * nodes.BEAT_S)
        assert self.report.state == "serving"

    @property
    def is_counted_on(self) -> bool:
        return self.member.reading().until_s > self.clock.now_s

    @property
    def report(self) -> WorkerReport:
        return WorkerReport.from_line(self.member.report().to_line())

    def put(self, number: int = 0) -> str:
        run: Any = Run(number.to_bytes(16, "little"))
        return self.member.put(run)

    def get(self, number: int = 0) -> GetEnded:
        today = self.opened.fleet.today
        assert today is not None
        run: Any = RunToGet(number.to_bytes(16, "little"), today)
        taken = self.member.take(lambda: run)
        assert taken is not None
        return self.member.get(taken)

    @contextlib.contextmanager
    def taken_away(self) -> Any:
        """The fleet's folder: a file is in its place."""
        fleets = self.folder / "v1"
        fleets.rename(self.folder / "aside")
        fleets.write_bytes(b"")
        yield
        fleets.unlink()
        (self.folder / "aside").rename(fleets)


class Library:
    """obstore, but for the calls that are given."""

    def __init__(self, **calls: Callable[..., Any]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return self._calls.get(name) or getattr(obstore, name)


def fail(error: Exception) -> Any:
    raise error


FULL = obstore.exceptions.GenericError("Generic S3 error: 507 Insufficient Storage")
REFUSED = obstore.exceptions.PermissionDeniedError("403 Forbidden")


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    monkeypatch.setattr(store_member.core, "PresenceFile", File, raising=False)
    return lambda **changes: Rig(tmp_path, **changes)


def test_host_serves_once_the_fleet_is_listed_and_the_others_have_seen_it(
    rig: Callable[..., Rig],
) -> None:
    made = rig()
    assert (made.report.state, made.member.may_put) == ("starting", False)
    made.open()
    assert (made.report.state, made.member.knows_its_filter) == ("starting", False)
    made.rounds(2 * nodes.BEAT_S - 10)
    assert made.member.knows_its_filter
    assert (made.report.state, made.member.may_put) == ("starting", False)
    assert "the other hosts" in made.report.reason
    made.rounds(20)
    assert (made.report.state, made.report.reason, made.member.may_put) == ("serving", "", True)


def test_filter_is_made_for_the_ttl_and_a_day(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.serve()
    file: Any = made.member._presence._file
    assert file.made == ("/presence", FLEET, 1000, 4)
    assert file.newest == made.opened.fleet.today


def test_report_counts_what_was_put(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.serve()
    assert [made.put(1), made.put(1), made.put(2)] == ["stored", "already", "stored"]
    report = made.report
    assert report.puts == {"stored": 2, "already": 1}
    assert (report.put_bytes, report.used_bytes) == (2 * len(DATA), 2 * len(DATA))
    assert (report.objects, report.objects_max, report.nodes) == (2, 1000, 1)
    assert report.listed_ago_s >= 0
    assert len([path for path in made.folder.rglob("*") if path.stat().st_size == len(DATA)]) == 2


def test_report_counts_no_put_whose_object_it_has_not(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: what ended while the report was made was counted, and its object was not."""
    made = rig()
    made.serve()
    figures = made.opened.gets.figures  # asked for right behind what the store has

    def put_beside() -> Any:
        made.put(1)
        return figures()

    monkeypatch.setattr(made.opened.gets, "figures", put_beside)
    report = made.report
    assert report.objects == 0
    assert report.puts == {}


def test_folder_that_is_not_there_is_waited_for(tmp_path: Path, rig: Callable[..., Rig]) -> None:
    mount = tmp_path / "mount"
    made = rig(url=f"file://{mount}")
    said = []

    def sleep(wait_s: float) -> None:
        said.append((wait_s, made.report.state, made.report.reason))
        if len(said) == 7:
            mount.mkdir()

    made.member.open(sleep)
    assert [wait_s for wait_s, _, _ in said] == [1, 2, 4, 8, 16, 30, 30]
    assert {state for _, state, _ in said} == {"failing"}
    assert str(mount) in said[0][2]
    assert made.report.state == "starting"


def test_ca_file_that_cannot_be_read_is_said(tmp_path: Path, rig: Callable[..., Rig]) -> None:
    made = rig(ca_file=str(tmp_path / "ca.pem"))

    def sleep(wait_s: float) -> None:
        assert made.report.state == "failing"
        assert "ca.pem" in made.report.reason
        (tmp_path / "ca.pem").write_bytes(b"")

    made.member.open(sleep)


def test_opening_that_hangs_shows_as_failing(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.clock.now_s += 11
    assert made.report.state == "failing"
    assert "mount" in made.report.reason


def test_store_that_fails_is_a_state_and_is_found_again(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.serve()
    with made.taken_away():
        for number in range(breaker.FAILURES):
            assert made.put(number) == "failed"
        report = made.report
        assert (report.state, made.member.may_put, report.breaker_opened) == ("failing", False, 1)
        assert "Not a directory" in report.reason
        assert str(made.folder) in report.reason
        made.rounds(nodes.BEAT_S)
        assert made.report.state == "failing"
    made.rounds(3 * nodes.BEAT_S)
    assert (made.report.state, made.member.may_put) == ("serving", True)
    assert made.put() == "stored"


@pytest.mark.parametrize(
    ("code", "state"), [("remote_refused", "refused"), ("remote_full", "full")]
)
def test_puts_that_are_not_taken_are_a_state_of_their_own(
    code: str, state: str, rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rig()
    made.serve()
    put = made.opened.store.put
    refuses = [True]

    def refused(name: str, data: Any, **how: Any) -> bool:
        if refuses[0] and "node" not in name:
            raise TransportError("put: the text of it", code=code)
        return put(name, data, **how)

    monkeypatch.setattr(made.opened.store, "put", refused)
    made.put()
    assert made.report.state == state
    assert "the text of it" in made.report.reason
    made.rounds(2 * store_gate.PROBE_EVERY_S)
    assert made.report.state == state
    refuses[0] = False
    made.rounds(store_gate.PROBE_EVERY_S + 5)
    if code == "remote_refused":
        assert made.report.state == "serving"  # a small put has found out
    assert made.put() == "stored"
    assert made.report.state == "serving"
    assert list(made.opened.store.list(made.member._names.probes_prefix)) == []


def test_capacity_that_is_used_up_is_full_and_not_exceeded(rig: Callable[..., Rig]) -> None:
    made = rig(capacity_bytes=10 * len(DATA))
    made.serve()
    results = [made.put(number) for number in range(20)]
    assert set(results) == {"stored", "no_room"}
    report = made.report
    assert (report.state, report.puts["no_room"]) == ("full", results.count("no_room"))
    assert "--remote-capacity" in report.reason
    assert report.used_bytes <= 10 * len(DATA)


def test_fleet_that_is_full_at_the_start_is_not_taken_for_one_that_is_listed(
    rig: Callable[..., Rig],
) -> None:
    before = rig()
    before.serve()
    assert before.put() == "stored"
    made = rig(capacity_bytes=len(DATA), node=8)
    made.open()
    made.rounds(3 * nodes.BEAT_S)
    assert made.report.state == "full"


def test_run_that_was_put_is_read_back_and_counted(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.serve()
    made.put(1)
    assert [made.get(1), made.get(2)] == [("filled", 4), ("missing", 0)]
    assert made.filled == [DATA]
    report = made.report
    assert (report.gets, report.get_bytes) == ({"filled": 1, "missing": 1}, len(DATA))
    assert report.damaged == {}


def test_store_is_counted_on_once_its_filter_is_there(rig: Callable[..., Rig]) -> None:
    made = rig()
    assert not made.is_counted_on
    made.open()
    assert not made.is_counted_on
    made.rounds(nodes.BEAT_S)
    assert made.is_counted_on


def test_store_that_fails_is_not_counted_on(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.serve()
    with made.taken_away():
        for number in range(breaker.FAILURES):
            assert made.get(number) == ("failed", 0)
        assert not made.is_counted_on
    made.rounds(3 * nodes.BEAT_S)
    assert made.is_counted_on


def test_clears_that_are_not_known_are_not_read_past(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rig()
    made.serve()
    monkeypatch.setattr(Epochs, "fresh_until_s", 0.0)
    assert not made.is_counted_on


@pytest.mark.parametrize(("took_s", "filled"), [(9, 1), (50, 0)])
def test_object_that_comes_after_the_clears_are_not_known_any_more_is_not_stored(
    took_s: float, filled: int, rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rig()
    made.serve()
    made.put(1)
    assert made.is_counted_on
    get = made.opened.store.get

    def slow(*how: Any) -> Any:
        made.clock.now_s += took_s
        return get(*how)

    monkeypatch.setattr(made.opened.store, "get", slow)
    assert made.get(1).end == ("filled" if filled else "late")
    assert len(made.filled) == filled


def test_clears_that_cannot_be_known_are_said_while_the_store_serves(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rig()
    made.serve()
    with monkeypatch.context() as patched:
        patched.setattr(epochs, "MARKERS_MAX", 0)
        made.opened.store.put(FleetNames(FLEET).epoch(b"n" * 16, 1), b"-")
        made.rounds(2 * epochs.FRESH_S)
        assert made.report.state == "serving"
        assert "markers of clears" in made.report.reason
    made.rounds(2 * epochs.LIST_EVERY_S)
    assert made.report.reason == ""


def test_store_that_refuses_gets_is_not_counted_on_until_it_gives_one(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rig()
    made.serve()
    get, refuses = made.opened.store.get, [True]

    def refused(name: str, *how: Any) -> Any:
        if refuses[0]:
            raise TransportError("get: the text of it", code="remote_refused")
        return get(name, *how)

    monkeypatch.setattr(made.opened.store, "get", refused)
    assert made.get() == ("failed", 0)
    assert not made.is_counted_on
    assert made.report.state == "refused"
    assert "the text of it" in made.report.reason
    made.rounds(2 * store_gate.PROBE_EVERY_S)
    assert not made.is_counted_on
    refuses[0] = False
    made.rounds(2 * store_gate.PROBE_EVERY_S)  # nobody asks for anything meanwhile
    assert made.is_counted_on
    assert made.report.state == "serving"


@pytest.mark.parametrize(("error", "state"), [(FULL, "full"), (REFUSED, "refused")])
@pytest.mark.parametrize("puts_runs", [True, False])
def test_store_that_takes_no_puts_is_read_on(
    error: Exception, state: str, puts_runs: bool, rig: Callable[..., Rig]
) -> None:
    """Incident: a full bucket. Beats, deltas and turns of the janitor went on to fail, and opened
    the breaker for reads as well, for as long as the bucket was full."""
    made = rig()
    made.serve()
    assert made.put(1) == "stored"
    today = made.opened.fleet.today
    assert today is not None
    over = FleetNames(FLEET).pages(PagesName(b"s" * 16, 0, today - 30, b"k" * 16))
    made.opened.store.put(over, DATA)
    tried: list[str] = []

    def put(store: Any, name: str, *unused: Any, **also: Any) -> Any:
        tried.append(name)
        raise error

    made.opened.store._obstore = Library(put=put, copy=put)
    minutes = 20
    for number in range(minutes * 60 // 5):
        if puts_runs and made.member.may_put:
            assert made.put(2 + number) != "stored"
        made.rounds(5)
        assert made.is_counted_on
        assert made.get(1) == ("filled", 4)
        assert made.report.state == state or number < nodes.BEAT_S / 5
    assert made.report.breaker_opened == 0
    assert not (made.folder / over).exists()
    # A small object every 30 s, and as often a run or what is put in place of one.
    assert len(tried) <= 2 * (minutes * 60 / store_gate.PROBE_EVERY_S + 1)
    made.opened.store._obstore = obstore
    made.rounds(2 * store_gate.PROBE_EVERY_S + 2 * nodes.BEAT_S)
    assert made.put() == "stored"
    assert made.report.state == "serving"


NO_LISTS = obstore.exceptions.GenericError("Generic S3 error: 500 Internal Server Error")


@pytest.mark.parametrize(("error", "state"), [(NO_LISTS, "failing"), (REFUSED, "refused")])
def test_store_that_is_not_listed_from_the_start_says_why(
    error: Exception, state: str, rig: Callable[..., Rig]
) -> None:
    """Incident: a policy without a right to list was "being listed" for ever; and a store whose
    listings failed changed its state every few seconds, with a line in the log for each."""
    made = rig()
    made.open()
    made.opened.store._obstore = Library(
        list=lambda *unused, **also: map(fail, [error]), list_with_delimiter=lambda *_: fail(error)
    )
    made.rounds(5)
    for _ in range(600 // 5):
        made.rounds(5)
        assert made.report.state == state
        assert str(error) in made.report.reason
    assert made.report.breaker_opened == 0
    made.opened.store._obstore = obstore
    made.rounds(2 * breaker.LAST_PROBE_S + 3 * nodes.BEAT_S)
    assert (made.report.state, made.report.reason) == ("serving", "")


def test_store_that_lists_no_more_is_put_to_and_says_why_it_is_not_read(
    rig: Callable[..., Rig],
) -> None:
    made = rig()
    made.serve()
    made.opened.store._obstore = Library(
        list=lambda *unused, **also: map(fail, [NO_LISTS]),
        list_with_delimiter=lambda *_: fail(NO_LISTS),
    )
    made.rounds(epochs.FRESH_S)
    for number in range(int(nodes.QUIET_S - nodes.BEAT_S - 2 * epochs.FRESH_S) // 5):
        made.rounds(5)
        assert made.put(number) == "stored"
        assert made.report.state == "serving"
        assert str(NO_LISTS) in made.report.reason
        assert not made.is_counted_on
    assert made.report.breaker_opened == 0


def test_call_for_others_that_failed_once_is_a_reason_for_some_seconds(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rig()
    made.serve()
    failure = TransportError("get: the text of it", code="remote_failed")
    monkeypatch.setattr(made.opened.fleet, "round", lambda: failure)
    made.member.round()
    monkeypatch.undo()
    assert (made.report.state, made.report.reason) == ("serving", "get: the text of it")
    made.rounds(20)
    assert (made.report.state, made.report.reason) == ("serving", "")
