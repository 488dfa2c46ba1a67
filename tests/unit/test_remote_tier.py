"""What looks after the remote tier's worker: over a program that says what a test has it say."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse import config
from kvwarehouse.daemon import remote_process, remote_tier
from kvwarehouse.daemon.logs import Log
from kvwarehouse.daemon.remote_process import environment
from kvwarehouse.daemon.remote_tier import RemoteTier
from kvwarehouse.errors import TransportError
from kvwarehouse.remote.report import (
    ClearTold,
    ClearWritten,
    EpochsFound,
    EpochsHeard,
    EpochsKnown,
    WorkerEvent,
    WorkerReport,
    WorkerSettings,
    read_told,
)
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from testkit import fake_worker

FLEET, NODE = "0123456789abcdef" * 2, 7


class Core:
    """Has the core's ends of the links, as the core has."""

    def __init__(self) -> None:
        self.links: list[socket.socket] = []
        self.get_links: list[socket.socket] = []
        self.refuses = 0

    def attach_remote(self, fd: int) -> None:
        link = socket.socket(fileno=fd)
        if self.refuses:
            self.refuses -= 1
            link.close()
            raise TransportError("the core did not answer", code="no_answer")
        self.links.append(link)

    def attach_remote_gets(self, fd: int) -> None:
        self.get_links.append(socket.socket(fileno=fd))


class Clears:
    """What looks after clears is told which worker runs and what it says of them."""

    def __init__(self) -> None:
        self.number, self.owed = 0, 3
        self.failed = ""
        self.tell: Any = None
        self.lines: list[tuple[int, Any]] = []

    def begin(self, number: int) -> None:
        self.number, self.tell = number, None

    def attach(self, tell: Any) -> None:
        self.tell = tell

    def detach(self) -> None:
        self.begin(0)

    def heard(self, number: int, line: Any) -> None:
        self.lines.append((number, line))


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.core = Core()
        self.clears: Any = Clears()
        self.log = io.StringIO()
        given = {
            "remote": f"file://{folder}", "fleet_secret": "/s", "remote_capacity": "1GiB",
            "arena_dir": str(folder / "arena"), "socket": str(folder / "socket"),
        }  # fmt: skip
        self.config = config.load(given, {})
        self.tier = self.made(self.config)

    def made(self, of: config.Config) -> RemoteTier:
        return RemoteTier(of, Log("json", self.log), self.core, FLEET, NODE, self.clears)

    def order(self, start: int | str, *lines: bytes) -> None:
        (self.folder / f"start-{start}").write_bytes(b"".join(lines))

    def pids(self) -> list[int]:
        file = self.folder / "pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [line for line in lines if line["event"] == name]

    def until(self, state: str, starts: int = 1) -> Any:
        """The status, once it is so."""

        def so() -> bool:
            status = self.tier.status()
            return (status.state, status.worker_starts) == (state, starts)

        eventually(so, f"state {state} of start {starts}")
        return self.tier.status()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    command = (sys.executable, "-P", fake_worker.__file__, str(tmp_path))
    monkeypatch.setattr(remote_process, "COMMAND", command)
    monkeypatch.setattr(remote_tier, "FIRST_WAIT_S", 0.01)
    for module, bound in ((remote_tier, "STOPS_WITHIN_S"), (remote_process, "LAST_LINES_S")):
        monkeypatch.setattr(module, bound, DEADLINE_S)  # on a machine that is busy
    made = Rig(tmp_path)
    made.order("any", report(), b"report\n")
    yield made
    made.tier.stop()
    assert [pid for pid in made.pids() if _lives(pid)] == []
    for link in made.core.links + made.core.get_links:
        link.close()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def report(**fields: Any) -> bytes:
    return WorkerReport(fields.pop("state", "serving"), **fields).to_line()


def test_status_is_what_the_worker_says(rig: Rig) -> None:
    assert rig.tier.status().state == "starting"
    line = report(
        state="full", reason="no room", used_bytes=5, objects=3, nodes=2, puts={"stored": 4},
        put_bytes=9, deleted_objects=1, breaker_opened=2, listed_ago_s=10.0,
        gets={"filled": 6}, get_bytes=8, damaged={"digest": 1}, read_bytes_per_s=5_000,
        first_byte_ms=2.5, epochs_ago_s=4.0,
    )  # fmt: skip
    rig.order(1, line, b"report\n")
    rig.tier.start()
    status = rig.until("full")
    assert (status.reason, status.used_bytes, status.objects, status.nodes) == ("no room", 5, 3, 2)
    assert (dict(status.puts), status.put_bytes) == ({"stored": 4}, 9)
    assert (status.deleted_objects, status.breaker_opened) == (1, 2)
    assert (dict(status.gets), status.get_bytes) == ({"filled": 6}, 8)
    assert (dict(status.damaged), status.epochs_owed) == ({"digest": 1}, 3)
    assert (status.read_bytes_per_s, status.first_byte_ms) == (5_000, 2.5)
    assert status.listed_ago_s >= 10
    assert 4 <= status.epochs_ago_s <= status.listed_ago_s
    assert (status.url, status.ttl_days) == (f"file://{rig.folder}", 7)
    assert (status.write, status.read) == ("reused", "on")
    assert (status.capacity_bytes, status.objects_max) == (1 << 30, 1 << 16)


def test_worker_is_told_what_it_has_to_know_and_has_its_end_of_the_link(rig: Rig) -> None:
    rig.tier.start()
    rig.until("serving")
    told = WorkerSettings.from_line((rig.folder / "settings").read_bytes())
    assert (told.fleet_id, told.node, told.write) == (FLEET, NODE, "reused")
    assert told.presence_path == str(rig.folder / "arena" / "presence")
    link = f"/proc/{rig.pids()[0]}/fd/{told.link_fd}"
    (ours,) = rig.core.links
    assert os.readlink(link).startswith("socket:")
    assert os.stat(link).st_ino != os.fstat(ours.fileno()).st_ino


@pytest.mark.parametrize("read", ["on", "off"])
def test_link_for_gets_is_there_where_loads_come_from_the_store(rig: Rig, read: str) -> None:
    rig.tier = rig.made(replace(rig.config, remote_read=read))
    rig.order(1, report(), b"end 7\n")
    rig.tier.start()
    rig.until("serving", 2)
    told = WorkerSettings.from_line((rig.folder / "settings").read_bytes())
    assert (told.read, told.gets) == (read == "on", 8)
    if read == "off":
        assert (told.links, rig.core.get_links) == ((told.link_fd,), [])
        return
    assert told.links == (told.link_fd, told.get_link_fd)
    inodes = [os.stat(f"/proc/{rig.pids()[1]}/fd/{fd}").st_ino for fd in told.links]
    ours = [os.fstat(link.fileno()).st_ino for link in (*rig.core.links, *rig.core.get_links)]
    assert len({*inodes, *ours}) == 6
    assert rig.core.get_links[0].recv(1) == b""  # the first worker's end is gone


def test_worker_that_ends_is_followed_by_another_and_counts_go_on(rig: Rig) -> None:
    first = report(
        puts={"stored": 4}, put_bytes=9, used_bytes=5, gets={"filled": 3, "damaged": 1},
        get_bytes=7, damaged={"size": 1},
    )  # fmt: skip
    second = report(
        puts={"stored": 1, "failed": 2}, put_bytes=1, used_bytes=6, gets={"filled": 1, "late": 1},
        get_bytes=2, damaged={"chain": 1},
    )  # fmt: skip
    rig.order(1, first, b"end 7\n")
    rig.order(2, second, b"report\n")
    rig.tier.start()
    status = rig.until("serving", 2)
    assert (dict(status.puts), status.put_bytes, status.used_bytes) == (
        {"stored": 5, "failed": 2}, 10, 6,
    )  # fmt: skip
    assert dict(status.gets) == {"filled": 4, "damaged": 1, "late": 1}
    assert (status.get_bytes, dict(status.damaged)) == (9, {"size": 1, "chain": 1})
    (ended,) = rig.events("remote_worker_ended")
    assert (ended["exit_code"], ended["pid"]) == (7, rig.pids()[0])
    assert ended["stderr"] == "PUT https://store/b failed"
    assert len(rig.core.links) == 2
    assert rig.core.links[0].recv(1) == b""  # the first worker's end is gone


def test_status_says_why_there_is_no_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "FIRST_WAIT_S", 1000.0)
    rig.order(1, report(used_bytes=5), b"end 7\n")
    rig.tier.start()
    status = rig.until("off")
    assert "code 7" in status.reason
    assert status.used_bytes == 5  # what was known last


@pytest.mark.parametrize(
    "line",
    [b"not json\n", b'{"kind": "report"}\n', b"x" * 100_000, report().rstrip() + b"}\n"],
)
def test_worker_that_cannot_be_believed_is_killed(rig: Rig, line: bytes) -> None:
    rig.order(1, report(), line + b"\n", b"silent\n")
    rig.tier.start()
    rig.until("serving", 2)
    (ended,) = rig.events("remote_worker_ended")
    assert "one version" in ended["text"]
    assert ended["exit_code"] == -9


def test_worker_that_says_nothing_any_more_is_killed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "LOOK_EVERY_S", 0.1)
    rig.order(1, report(), b"silent\n")
    rig.tier.start()
    ended = eventually(lambda: rig.events("remote_worker_ended"), "it is killed")[0]
    assert "said nothing" in ended["text"]
    assert ended["exit_code"] == -9
    eventually(lambda: rig.tier.status().worker_starts > 1, "another one runs")


def test_worker_that_cannot_be_ended_is_left_behind_until_it_is_gone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(remote_tier, "SILENT_LOOKS", 1 << 30)
    monkeypatch.setattr(remote_tier, "START_LOOKS", 1 << 30)
    monkeypatch.setattr(remote_tier, "ENDS_WITHIN_S", 0.0)
    hung: list[RemoteTierProcess] = []

    class RemoteTierProcess(remote_process.RemoteProcess):
        """The first one is on a mount that hangs."""

        def wait(self, timeout_s: float) -> bool:
            hung.append(self)
            return (hung[0] is not self or released[0]) and super().wait(timeout_s)

    released = [False]
    monkeypatch.setattr(remote_tier, "RemoteProcess", RemoteTierProcess)
    rig.order(1, report(), b"not json\n", b"silent\n")
    rig.tier.start()
    status = rig.until("off")
    assert "mount" in status.reason
    eventually(lambda: len(hung) > 5, "it is looked at again")
    assert len(rig.events("remote_worker_hangs")) == 1
    assert len(rig.pids()) == 1
    released[0] = True
    rig.until("serving", 2)


def test_core_that_does_not_answer_is_asked_again(rig: Rig) -> None:
    rig.core.refuses = 2
    rig.tier.start()
    rig.until("serving")
    assert ["did not answer" in each["text"] for each in rig.events("remote_worker_ended")] == [
        True, True,
    ]  # fmt: skip


def test_events_of_the_worker_are_logged_and_no_others_and_no_more_than_their_text(
    rig: Rig,
) -> None:
    events = [
        WorkerEvent("remote_failing", {"text": "no answer", "level": "x", "self": 1}),
        WorkerEvent("stopped", {"text": "not the worker's to say"}),
    ]
    rig.order(1, *(event.to_line() for event in events), report(), b"report\n")
    rig.tier.start()
    rig.until("serving")
    (failing,) = rig.events("remote_failing")
    assert failing.keys() == {"time", "level", "event", "text"}
    assert rig.events("stopped") == []
    (started,) = eventually(lambda: rig.events("remote_worker_started"), "its start is said")
    assert started["pid"] == rig.pids()[0]


def test_bug_in_the_supervision_is_said_and_shows(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*unused: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(rig.core, "attach_remote", broken)
    rig.tier.start()
    eventually(lambda: rig.tier.status().state == "off", "it is off")
    assert rig.events("remote_stopped")[0]["error"] == "ZeroDivisionError"


def test_stop_ends_the_worker_and_waits_for_nothing_else(rig: Rig) -> None:
    rig.order(1, report(), b"silent\n")
    rig.tier.start()
    rig.until("serving")
    (pid,) = rig.pids()
    rig.tier.stop()
    assert not _lives(pid)
    assert rig.events("remote_worker_ended") == []


def test_stop_before_the_start_is_over_is_a_stop(rig: Rig) -> None:
    rig.tier.start()
    rig.tier.stop()
    assert [pid for pid in rig.pids() if _lives(pid)] == []


def test_worker_has_what_libraries_of_stores_read_and_nothing_else() -> None:
    kept = {"AWS_REGION": "r", "GOOGLE_APPLICATION_CREDENTIALS": "/g", "AZURE_TENANT_ID": "t",
            "SSL_CERT_FILE": "/c", "HOME": "/h", "PATH": "/p", "https_proxy": "p",
            "PYTHONPATH": "/y", "LANG": "C"}  # fmt: skip
    others = {"KVW_TOKEN": "secret", "HF_TOKEN": "secret", "OPENAI_API_KEY": "secret", "TERM": "x"}
    assert environment({**kept, **others}) == {**kept, "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("capacity_bytes", "objects"),
    [(1, 1 << 16), (1 << 40, 1 << 18), (80 << 40, 1 << 24), (1 << 60, 1 << 24)],
)
def test_filter_is_made_for_what_the_capacity_holds(capacity_bytes: int, objects: int) -> None:
    assert remote_tier.filter_objects(capacity_bytes) == objects


def test_what_the_worker_says_of_clears_is_told_on_and_it_is_told_what_was_heard(rig: Rig) -> None:
    found = EpochsFound(1, 0, {FLEET: 7})
    written = ClearWritten(FLEET, 7, 3, 0)
    rig.order(1, found.to_line(), written.to_line(), report(), b"report\n")
    rig.tier.start()
    rig.until("serving")
    assert rig.clears.lines == [(1, found), (1, written)]
    eventually(lambda: rig.clears.tell is not None, "it can be told")
    assert rig.clears.tell(ClearTold(FLEET, 4))
    assert rig.clears.tell(EpochsHeard(1))
    told = rig.folder / "told"
    eventually(lambda: told.exists() and len(told.read_bytes().splitlines()) == 2, "it is told")
    lines = [read_told(line) for line in told.read_bytes().splitlines(keepends=True)]
    assert lines == [ClearTold(FLEET, 4), EpochsHeard(1)]


def test_nobody_is_told_once_the_worker_has_ended(rig: Rig) -> None:
    rig.order(1, report(), b"report\n")
    rig.order("any", report(), b"silent\n")
    rig.tier.start()
    rig.until("serving")
    eventually(lambda: rig.clears.tell is not None, "it can be told")
    tell = rig.clears.tell
    os.kill(rig.pids()[0], signal.SIGKILL)
    eventually(lambda: len(rig.pids()) == 2, "another one runs")
    assert not tell(EpochsHeard(1))


def test_worker_that_has_yet_to_say_a_line_is_not_told_anything(rig: Rig) -> None:
    """Its libraries may take longer to load than it has to read what it is told."""
    rig.order(1, b"silent\n")
    rig.tier.start()
    eventually(lambda: (rig.folder / "settings").exists(), "it runs")
    process = eventually(lambda: rig.tier._process, "it is watched")
    process.changed.set()
    eventually(lambda: not process.changed.is_set(), "it was looked at")
    assert rig.clears.tell is None


def test_worker_that_does_not_read_what_it_is_told_is_killed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_process, "TELL_WITHIN_S", 0.05)
    rig.order(1, report(), b"deaf\n")
    rig.tier.start()
    eventually(lambda: rig.clears.tell is not None, "it can be told")
    tell = rig.clears.tell
    line = EpochsKnown({f"{number:032x}": 1 for number in range(500)})
    told = 0
    while tell(line):
        told += 1
        assert told < 100, "a pipe is endless"
    (ended,) = eventually(lambda: rig.events("remote_worker_ended"), "it is killed")
    assert ended["text"] == "it does not read what it is told"


def test_tier_ends_where_clears_are_not_followed_any_more(rig: Rig) -> None:
    rig.tier.start()
    rig.until("serving")
    rig.clears.failed = "RuntimeError: a bug"
    status = rig.until("off")
    assert "a bug" in status.reason
    eventually(lambda: not any(map(_lives, rig.pids())), "the end of its worker")
    assert len(rig.pids()) == 1
