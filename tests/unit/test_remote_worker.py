"""The worker of the remote tier as a process, over doubles of what is the core's
(testkit/worker_program.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.remote.names import FleetNames
from kvwarehouse.remote.report import (
    EXIT_FAILED,
    EXIT_HUNG,
    EXIT_LINK_CLOSED,
    LINE_BYTES_MAX,
    ClearTold,
    ClearWritten,
    EpochsFound,
    EpochsHeard,
    FromWorker,
    WorkerEvent,
    WorkerReport,
    WorkerSettings,
    read_line,
)
from kvwarehouse_bench.harness.eventually import eventually
from testkit import worker_program

FLEET = bytes(range(16))
WORKER_NICE = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
SUPPORT = str(Path(worker_program.__file__).parents[1])
SETTINGS = WorkerSettings(
    link_fd=0, get_link_fd=0, socket="", presence_path="", fleet_id=FLEET.hex(), node=7, url="",
    endpoint="", region="", ca_file="", connect_s=1.0, get_deadline_s=60.0,
    put_deadline_s=60.0, puts=2, gets=3, read=True, write_bytes_per_s=0, write="reused",
    capacity_bytes=1 << 30, ttl_days=7, objects=1000,
)  # fmt: skip
PARENT = """
import subprocess, sys, time
print(subprocess.Popen(sys.argv[1:]).pid, flush=True)
time.sleep(1000)
"""


def command(*runs: str) -> list[str]:
    return [sys.executable, "-P", worker_program.__file__, *runs]


class Worker:
    def __init__(self, folder: Path, *runs: str, deadline_s: float = 60.0, **changes: Any) -> None:
        self.folder = folder
        self.stderr = ""  # as far as it was read
        pipe = subprocess.PIPE
        environment = {**os.environ, "PYTHONPATH": SUPPORT}
        self.process: Any = subprocess.Popen(
            command(*runs), stdin=pipe, stdout=pipe, stderr=pipe, env=environment
        )
        settings = replace(SETTINGS, url=f"file://{folder}", put_deadline_s=deadline_s, **changes)
        self.process.stdin.write(replace(settings, get_deadline_s=deadline_s).to_line())
        self.process.stdin.flush()

    def said(self) -> Iterator[FromWorker]:
        """To its end."""
        for line in self.process.stdout:
            yield read_line(line)

    def until(self, so: Callable[[WorkerReport], object]) -> WorkerReport:
        for said in self.said():
            if isinstance(said, WorkerReport) and so(said):
                return said
        raise AssertionError(f"it ended: {self.process.stderr.read()}")

    def wrote(self, text: str, times: int = 1) -> None:
        """Returns when what is printed has come to stderr so often."""
        while self.stderr.count(text) < times:
            line = self.process.stderr.readline()
            assert line, f"it ended: {self.stderr}"
            self.stderr += line.decode()

    def tell(self, lines: bytes) -> None:
        self.process.stdin.write(lines)
        self.process.stdin.flush()

    def ended(self) -> int:
        return int(self.process.wait(60))

    def close(self) -> str:
        """What it said on stderr."""
        process = self.process
        process.kill()
        process.wait(60)
        if not process.stderr.closed:
            self.stderr += process.stderr.read().decode()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
        return self.stderr


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(*runs: str, deadline_s: float = 60.0, **changes: Any) -> Worker:
        workers.append(Worker(tmp_path, *runs, deadline_s=deadline_s, **changes))
        return workers[-1]

    yield start
    for each in workers:
        each.close()


def test_worker_puts_what_is_offered_and_reports(started: Callable[..., Worker]) -> None:
    worker = started("run", "run")
    events: list[str] = []
    for said in worker.said():
        if isinstance(said, WorkerEvent):
            events.append(said.event)
        elif isinstance(said, WorkerReport) and said.puts == {"stored": 2} and events:
            break  # a state is an event once it has lasted
    assert events == ["remote_serving"]
    assert isinstance(said, WorkerReport)
    assert said.put_bytes == 2 * len(worker_program.OBJECT)
    worker.wrote("run done", times=2)  # a run is counted before that
    stderr = worker.close()  # before its files are looked at: it puts some of its own, and renames
    names = FleetNames(FLEET)
    files = [path for path in worker.folder.rglob("*") if path.is_file()]
    pages = [path for path in files if names.pages_of(str(path.relative_to(worker.folder)))]
    assert [path.read_bytes() for path in pages] == [worker_program.OBJECT] * 2
    shared = [path for path in worker.folder.rglob("*") if path.stat().st_mode & 0o077]
    assert shared == []
    assert "ready for 2" in stderr
    assert stderr.count(f"run done at nice {max(15, WORKER_NICE)}") == 2


def test_worker_gets_what_is_wanted_and_says_how_the_store_is(
    started: Callable[..., Worker],
) -> None:
    worker = started("run", "get", "get")
    for line in worker.said():  # until the link ends
        if isinstance(line, EpochsFound):
            worker.tell(EpochsHeard(line.serial).to_line())
    assert worker.ended() == EXIT_LINK_CLOSED
    stderr = worker.close()
    assert "ready for 3 gets" in stderr
    assert stderr.count(f"4 pages filled at nice {WORKER_NICE}") == 2


def test_worker_of_a_daemon_that_gives_way_to_all_does_so_too() -> None:
    """Incident: who is not root may not go back to 15, and the threads that put ended at that."""
    code = """
import os
from kvwarehouse.remote import own_process
os.nice(19)
own_process.keep_to_itself()
own_process.give_way()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""
    command = [sys.executable, "-P", "-c", code]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"19\n"


def test_worker_that_reads_nothing_has_no_link_for_gets(started: Callable[..., Worker]) -> None:
    worker = started("run", "get", read=False)
    worker.until(lambda report: report.puts == {"stored": 1})
    assert "gets" not in worker.close()


def test_worker_that_writes_nothing_takes_no_runs(started: Callable[..., Worker]) -> None:
    worker = started("run", write="none")
    worker.until(lambda report: report.state == "serving")
    stderr = worker.close()
    assert "ready for 2" not in stderr
    assert "stored" not in stderr


def test_worker_says_what_was_cleared_and_marks_what_it_is_told(
    started: Callable[..., Worker],
) -> None:
    names, space = FleetNames(FLEET), b"s" * 16
    worker = started()
    said = worker.said()
    assert next(line for line in said if isinstance(line, EpochsFound)) == EpochsFound(1, 0, {})
    worker.tell(EpochsHeard(1).to_line() + ClearTold(space.hex(), 5).to_line())
    written = next(line for line in said if isinstance(line, ClearWritten))
    assert (written.namespace, written.clear_epoch, written.below) == (space.hex(), 5, 0)
    assert (worker.folder / names.epoch(space, written.epoch)).is_file()
    found = next(line for line in said if isinstance(line, EpochsFound))
    assert found.epochs == {space.hex(): written.epoch}
    worker.until(lambda report: report.epochs_ago_s >= 0)


@pytest.mark.parametrize("line", [b"not json\n", b'{"kind": "report"}\n', b"x" * LINE_BYTES_MAX])
def test_worker_ends_where_it_is_told_what_is_no_line(
    started: Callable[..., Worker], line: bytes
) -> None:
    worker = started()
    worker.until(lambda report: True)
    worker.tell(line + b"xx\n")
    assert worker.ended() == EXIT_FAILED
    assert "a line between the daemon and its remote worker" in worker.close()


def test_worker_ends_with_its_daemons_end(started: Callable[..., Worker]) -> None:
    worker = started()
    worker.until(lambda report: report.state == "serving")
    worker.process.stdin.close()
    assert worker.ended() == 0


def test_worker_ends_with_its_parent_though_somebody_holds_its_stdin() -> None:
    reader, writer = os.pipe()
    try:
        with subprocess.Popen(
            [sys.executable, "-c", PARENT, *command()], stdin=reader, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": SUPPORT}, text=True,
        ) as parent:  # fmt: skip
            os.write(writer, replace(SETTINGS, url="file:///nowhere").to_line())
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert isinstance(read_line(parent.stdout.readline().encode()), WorkerReport)
            parent.kill()
        eventually(lambda: not _runs(pid), "the worker has ended")
    finally:
        os.close(reader)
        os.close(writer)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"  # nobody may be there to bury it


def test_worker_leaves_signals_to_its_daemon(started: Callable[..., Worker]) -> None:
    worker = started()
    worker.until(lambda report: report.state == "serving")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        worker.process.send_signal(number)
    for _ in range(3):
        worker.until(lambda report: report.state == "serving")


def test_bug_is_an_event_and_the_end(started: Callable[..., Worker]) -> None:
    worker = started("bug")
    events = [said for said in worker.said() if isinstance(said, WorkerEvent)]
    assert events[-1] == WorkerEvent(
        "remote_worker_failed", {"error": "ZeroDivisionError", "text": "at https://store/b"}
    )
    assert worker.ended() == EXIT_FAILED
    assert "pack_run" in worker.close()


def test_link_that_is_closed_is_the_end(started: Callable[..., Worker]) -> None:
    worker = started("closed")
    assert "remote_worker_failed" not in [
        said.event for said in worker.said() if isinstance(said, WorkerEvent)
    ]
    assert worker.ended() == EXIT_LINK_CLOSED


def test_call_of_the_store_that_hangs_is_the_end(started: Callable[..., Worker]) -> None:
    worker = started("hangs", deadline_s=0.1)
    reports = [said for said in worker.said() if isinstance(said, WorkerReport)]
    assert worker.ended() == EXIT_HUNG
    assert (reports[-1].state, "mount" in reports[-1].reason) == ("failing", True)


def test_what_a_library_prints_is_no_line_of_the_worker(started: Callable[..., Worker]) -> None:
    worker = started("prints")
    worker.until(lambda report: report.puts == {"stored": 1})
    assert "a library says something" in worker.close()


def test_settings_that_are_none_are_the_end(tmp_path: Path) -> None:
    ended = subprocess.run(
        command(), input=b"{}\n", capture_output=True, env={**os.environ, "PYTHONPATH": SUPPORT},
        check=False,
    )  # fmt: skip
    assert ended.returncode not in (0, None)
    assert b"WorkerSettings" in ended.stderr
