"""A program of several processes: one group, one log, no survivors. One owner; not thread-safe."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_TAIL_BYTES = 6_000
_POLL_S = 0.05
_MADE = ("/dev/shm/psm_", "/dev/shm/sem.mp-", "/dev/shm/vllm_")


class ProgramError(RuntimeError):
    """A program did not start, refused a call, or did not answer in time. Its log's end is in the
    text."""


class Group:
    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self._log = log
        self._command = list(command)
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, inherit: Sequence[int] = ()) -> None:
        """inherit: descriptors that the program gets."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(inherit),
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def interrupt(self) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGTERM)

    def wait_ended(self, timeout_s: float) -> bool:
        return wait_for(lambda: not self.running, timeout_s)

    def kill(self) -> None:
        """SIGKILL to all that is left of the group. More than once is once."""
        process, self._process = self._process, None
        if process is None:
            return
        left = _shared_memory(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in left:
            path.unlink(missing_ok=True)

    def tail(self) -> str:
        data = self._log.read_bytes() if self._log.exists() else b""
        return data[-_TAIL_BYTES:].decode("utf-8", "replace")


def _shared_memory(group: int) -> set[Path]:
    """What Python and vLLM made in /dev/shm for the processes of a group, and what would stay there
    when they are killed."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(folder.name)) == group:
                mapped = (folder / "maps").read_text(encoding="utf-8", errors="replace")
                found |= {
                    Path(line.split(maxsplit=5)[5])
                    for line in mapped.splitlines()
                    if any(f" {name}" in line for name in _MADE)
                }
    return {path for path in found if path.exists()}


def wait_for(met: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it was met in time."""
    end = time.monotonic() + timeout_s
    while not met():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True
