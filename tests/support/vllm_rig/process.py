"""A program of several processes: one group, one log, no survivors. One owner; not thread-safe."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvwarehouse_bench.harness.eventually import eventually

_TAIL_CHARACTERS = 12_000
_CHATTER = "Successfully reset prefix cache"
_POLL_S = 0.05
_RIG = Path(__file__).resolve().parent.parent


class StartError(AssertionError):
    """The program ended, or did nothing in time, before it was ready. The text has the end of its
    log, `log` all of it."""

    def __init__(self, text: str, log: str) -> None:
        super().__init__(text)
        self.log = log


class Group:
    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self.command, self.log, self._environment = list(command), log, environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, inherit: Sequence[int] = ()) -> None:
        """inherit: descriptors that the program gets."""
        path = os.pathsep.join([str(_RIG), *filter(None, [os.environ.get("PYTHONPATH")])])
        leashed = [sys.executable, "-P", "-m", "vllm_rig.leash", *self.command]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                leashed,
                # -P for children too: a source tree in the working directory hides no package.
                env={**self._environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(inherit),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the group."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether the leader ended in time."""
        end = time.monotonic() + timeout_s
        never = threading.Event()
        while self.running and time.monotonic() < end:
            never.wait(_POLL_S)
        return not self.running

    def interrupt(self) -> None:
        """What Ctrl-C or an orchestrator does, to the program alone."""
        for child in _children(self.pid):
            os.kill(child, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to every process of the group, and the end of all. More than once is once."""
        if self._process is None:
            return
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        eventually(lambda: not _members(group), f"the end of process group {group}")
        self._process = None

    def tail(self) -> str:
        """The end of the log, without what it says all the time."""
        lines = self.text().splitlines(keepends=True)
        return "".join(line for line in lines if _CHATTER not in line)[-_TAIL_CHARACTERS:]

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""


def _stat(pid: str) -> list[str]:
    """state, parent, group, ... of a process; empty when it is gone."""
    try:
        return Path("/proc", pid, "stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    except OSError:
        return []


def _processes() -> dict[int, list[str]]:
    found = {int(pid): _stat(pid) for pid in os.listdir("/proc") if pid.isdigit()}
    return {pid: stat for pid, stat in found.items() if stat and stat[0] != "Z"}


def _members(group: int) -> list[int]:
    return [pid for pid, stat in _processes().items() if int(stat[2]) == group]


def _children(parent: int) -> list[int]:
    return [pid for pid, stat in _processes().items() if int(stat[1]) == parent]
