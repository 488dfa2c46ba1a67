"""A kernel that does not come to give huge pages: as happened beside engines that kept every
processor busy, but for good. Here the process that asks for them is stopped. Nobody waits for it:
a daemon starts, serves from NVMe, takes all of its memory, and ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.serving import Serving
from testkit.known_prompt import KnownPrompt

_PAGES = 8


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """With as much memory as takes a while to be taken."""
    with Serving(tmp_path, dram="512MiB", nvme_capacity="32MiB", nvme_segment="2MiB") as serving:
        yield serving


def _asking(daemon: int) -> int | None:
    """The process that asks for that daemon, once it has nothing else open; its own name says so.
    Threads and children come and go meanwhile."""
    for task in Path(f"/proc/{daemon}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                if Path(f"/proc/{child}/comm").read_text() == "kvw-huge-pages\n":
                    return int(child)
    return None


def _ended(pid: int) -> bool:
    """Or a zombie, where nobody asks for what its parent left behind."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b""
    except (FileNotFoundError, ProcessLookupError):
        return True


def _asking_at_start(serving: Serving) -> int | None:
    """That process of a daemon that is started anew, without an arena; None where it was through
    before this one had a look."""
    serving.stop()
    serving.lose_arena()
    serving.launch()
    eventually(
        lambda: _asking(serving.pid) or _is_populated(serving), "a process that asks, or has asked"
    )
    return _asking(serving.pid)


def _stop(pid: int) -> bool:
    """Returns once it stands still; False where it has ended instead."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _state(pid) in ("T", "Z", "X"), "it stands still, or has ended")
    return _state(pid) == "T"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


@contextmanager
def _stopped_at_start(serving: Serving) -> Iterator[int]:
    """A daemon that has just been started, and that process, which is stopped until the end."""

    def stopped() -> int | None:
        pid = _asking_at_start(serving)
        return pid if pid is not None and _stop(pid) else None

    pid = eventually(stopped, "a process that asks for huge pages is stopped")
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def _populated(client: kvw.Client) -> bool:
    dram = client.status()["core"]["tiers"]["dram"]
    return bool(dram["populated_bytes"] == dram["capacity_bytes"])


def _is_populated(serving: Serving) -> bool:
    if not serving.events("ready"):
        return False
    with serving.connect_remote(timeout_s=DEADLINE_S) as client:
        return _populated(client)


def test_nobody_waits_for_huge_pages_that_do_not_come(serving: Serving) -> None:
    prompt = KnownPrompt("m", pages=_PAGES, page_bytes=65536)
    with serving.connect_remote() as client:
        prompt.store_whole(client)
        assert client.flush().pending == 0
    with _stopped_at_start(serving) as pid:
        assert serving.said("ready"), serving.tail()
        with serving.connect() as client:
            assert prompt.load(client) == _PAGES
            eventually(lambda: _populated(client), "an arena that is populated")
        assert _asking(serving.pid) == pid, "it was not stopped in time"
        assert serving.stop() == 0


def test_process_that_asks_for_huge_pages_ends_when_all_memory_is_taken(serving: Serving) -> None:
    with serving.connect_remote() as client:
        eventually(lambda: _populated(client), "an arena that is populated")
    eventually(lambda: _asking(serving.pid) is None, "a daemon without that process")


def test_process_that_asks_for_huge_pages_ends_with_a_daemon_that_is_killed(
    serving: Serving,
) -> None:
    pid = eventually(lambda: _asking_at_start(serving), "a process that asks for huge pages")
    serving.kill()
    eventually(lambda: _ended(pid), "a process that has ended")
