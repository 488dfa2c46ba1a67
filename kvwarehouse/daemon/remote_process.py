"""One run of a remote worker (kvwarehouse/remote/worker.py) as the daemon sees it: started, told
its settings, listened to, killed.

The thread that starts it has to live as long as it: a worker ends with that thread. Two threads
read what it says; where nothing ends a worker, a mount that hangs, they stay behind with it.
Otherwise thread-safe.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final

from kvwarehouse.errors import InternalError
from kvwarehouse.remote.library_texts import without_secrets
from kvwarehouse.remote.report import (
    LINE_BYTES_MAX,
    FromWorker,
    ToWorker,
    WorkerSettings,
    read_line,
)

COMMAND: Sequence[str] = (sys.executable, "-P", "-m", "kvwarehouse.remote.worker")

TELL_WITHIN_S: Final = 5.0
"""A worker that has not read what it is told by then hangs."""

LAST_LINES_S: Final = 3.0
"""How long what an ended worker has said may take to be read: on a host where this process gets no
processor for a while, and for ever where a child of its own holds its pipes open."""

_NAMES: Final = (
    "HOME", "PATH", "LANG", "LD_LIBRARY_PATH", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
)  # fmt: skip
_PREFIXES: Final = ("AWS_", "GOOGLE_", "AZURE_", "SSL_CERT_", "PYTHON", "LC_")

_STDERR_LINES: Final = 8
_STDERR_CHARACTERS: Final = 300


def environment(daemons: Mapping[str, str]) -> dict[str, str]:
    """What libraries of stores read of the daemon's, and nothing else."""
    kept = {
        name: value
        for name, value in daemons.items()
        if name in _NAMES or name.startswith(_PREFIXES)
    }
    return {**kept, "OPENBLAS_NUM_THREADS": "1"}  # or numpy starts one for each core


class RemoteProcess:
    """`hear`: called from a thread for each line. Raises OSError where none can be started."""

    def __init__(
        self,
        settings: WorkerSettings,
        hear: Callable[[FromWorker], None],
    ) -> None:
        self._hear = hear
        self.heard = 0  # lines
        self.problem = ""  # why it cannot be believed
        self.changed = threading.Event()
        """Set with each line, and when its stdout ends."""
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._telling = threading.Lock()
        self._is_deaf = False
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(os.environ),
            pass_fds=settings.links,
            process_group=0,  # a terminal's Ctrl-C is for the daemon
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            self._reader("kvw-remote-lines", self._read_lines, self._process.stdout),
            self._reader("kvw-remote-stderr", self._read_stderr, self._process.stderr),
        ]
        os.set_blocking(self._process.stdin.fileno(), False)
        self.tell(settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative: of a signal. None: it runs."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """What it wrote to stderr last."""
        return " | ".join(tuple(self._stderr))

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """True: it has ended, and its last lines are read, if that takes no longer than
        LAST_LINES_S."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        until_s = time.monotonic() + LAST_LINES_S
        for reader in self._readers:
            reader.join(max(until_s - time.monotonic(), 0.0))
        return True

    def close(self) -> None:
        """Lets go of it, as it is."""
        assert self._process.stdin is not None
        with self._telling:
            self._is_deaf = True
            self._process.stdin.close()

    def tell(self, line: WorkerSettings | ToWorker) -> bool:
        """False: it does not listen any more. Waits for it for TELL_WITHIN_S at most; one that does
        not read until then is a problem."""
        with self._telling:
            if not self._is_deaf:
                self._is_deaf = not self._write(line.to_line())
            return not self._is_deaf

    def _write(self, data: bytes) -> bool:
        assert self._process.stdin is not None
        fd, until_s = self._process.stdin.fileno(), time.monotonic() + TELL_WITHIN_S
        writable = select.poll()
        writable.register(fd, select.POLLOUT)
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not writable.poll(left_s * 1000):
                    self.problem = self.problem or "it does not read what it is told"
                    self.changed.set()
                    return False
            except BrokenPipeError:
                return False  # it has ended: its exit code says more
        return True

    def _reader(
        self, name: str, read: Callable[[IO[bytes]], None], stream: IO[bytes]
    ) -> threading.Thread:
        def run() -> None:
            with stream:
                read(stream)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _read_lines(self, stream: IO[bytes]) -> None:
        try:
            while line := stream.readline(LINE_BYTES_MAX + 1):
                self._hear(read_line(line))
                self.heard += 1
                self.changed.set()
        except InternalError as error:
            self.problem = error.message
        finally:
            self.changed.set()

    def _read_stderr(self, stream: IO[bytes]) -> None:
        while line := stream.readline(LINE_BYTES_MAX):
            text = without_secrets(line.decode(errors="backslashreplace").rstrip())
            self._stderr.append(text[:_STDERR_CHARACTERS])
