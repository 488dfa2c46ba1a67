"""Who is alone is beside nobody, who shares is beside all others that share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvwarehouse.testing.turns import Turns
from kvwarehouse.testing.until import until


class Taker:
    """A thread that takes a turn, says so, and keeps it until it is told."""

    def __init__(self, turn: AbstractContextManager[None]) -> None:
        self.inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._take, args=(turn,))
        self._thread.start()

    def leave(self) -> None:
        self._leave.set()
        self._thread.join()

    def _take(self, turn: AbstractContextManager[None]) -> None:
        with turn:
            self.inside.set()
            assert self._leave.wait(60)


def waiting(path: Path) -> int:
    """How many wait for a lock of the file, as the kernel says."""
    inode = f":{path.stat().st_ino} "
    return sum("->" in line and inode in line for line in open("/proc/locks", encoding="ascii"))


def test_those_who_share_are_beside_each_other(tmp_path: Path) -> None:
    turns = Turns(tmp_path)
    takers = [Taker(turns.shared()) for _ in range(3)]
    assert all(taker.inside.wait(60) for taker in takers)
    for taker in takers:
        taker.leave()


def test_who_is_alone_waits_for_those_inside_and_keeps_out_those_who_come_later(
    tmp_path: Path,
) -> None:
    turns = Turns(tmp_path)
    first = Taker(turns.shared())
    assert first.inside.wait(60)
    alone = Taker(turns.alone())
    until(lambda: waiting(tmp_path / "room") == 1, "the second waits for an empty room")
    last = Taker(turns.shared())
    until(lambda: waiting(tmp_path / "door") == 1 or last.inside.is_set(), "the third is there")
    assert not alone.inside.is_set()
    assert not last.inside.is_set()
    first.leave()
    assert alone.inside.wait(60)
    until(lambda: waiting(tmp_path / "room") == 1, "the third waits for an empty room")
    assert not last.inside.is_set()
    alone.leave()
    assert last.inside.wait(60)
    last.leave()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_process_that_ends_gives_its_turn_back(tmp_path: Path, end: signal.Signals) -> None:
    code = (
        "import sys, pathlib; from kvwarehouse.testing.turns import Turns\n"
        "with Turns(pathlib.Path(sys.argv[1])).alone(): print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        taker = Taker(Turns(tmp_path).shared())
        until(lambda: waiting(tmp_path / "room") == 1, "this one waits")
        assert not taker.inside.is_set()
        os.kill(process.pid, end)
        assert taker.inside.wait(60)
        taker.leave()
