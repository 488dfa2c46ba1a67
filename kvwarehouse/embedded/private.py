"""The parent's side of a private daemon: start, kill, stop, start again.

Not thread-safe: one owner, and one process: a fork's copy of it leaves the daemon alone. The daemon
is a process of its own (kvwarehouse/embedded/__main__.py).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from kvwarehouse.embedded.folder import PrivateFolder
from kvwarehouse.errors import TransportError, UsageError, from_native
from kvwarehouse.sizes import parse_size

_READY = b"ready"
_ANSWER_BYTES = 64 << 10
_LOG_TAIL_BYTES = 2000
_KILL_WAIT_S = 10.0


class PrivateDaemon:
    """A daemon in a temporary directory. Also a context manager: `start`, then `remove`.

    settings: those of `kvwarehouse serve` by their names in the configuration file; socket, arena
    and HTTP default to private ones. The directory, and with it the DRAM tier, stays over stop,
    kill and start, as a real one does."""

    def __init__(self, settings: Mapping[str, Any], *, start_timeout_s: float = 60.0) -> None:
        self._owner = os.getpid()
        dram_bytes = parse_size(settings.get("dram", 0), name="dram")
        self._folder = PrivateFolder(dram_bytes)
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._settings = {
            "socket": str(self._folder.path / "kvw.sock"),
            "arena_dir": str(self._folder.path / "arena"),
            "http": "off",
            "log_format": "json",
            **settings,
        }

    @property
    def socket(self) -> str:
        return str(self._settings["socket"])

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    @property
    def arena_dir(self) -> Path:
        return Path(self._settings["arena_dir"])

    @property
    def log_path(self) -> Path:
        """What the daemon wrote to stdout and stderr, all starts together."""
        return self._folder.path / "daemon.log"

    @property
    def pid(self) -> int:
        """Of the running daemon; UsageError when none is, or in a forked process."""
        return self._running().pid

    def start(self) -> None:
        """Starts the daemon and waits until it serves. Raises what it refused to start with, or
        TransportError (code "start_timeout") with the end of its log."""
        self._refuse_forked()
        if self._process is not None and self._process.poll() is None:
            raise UsageError("the private daemon is running already; stop it first", code="running")
        answer, child = os.pipe()
        try:
            self._process = self._spawn(child)
        finally:
            os.close(child)
        try:
            self._await(answer)
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(answer)

    def kill(self) -> None:
        """SIGKILL, as a crash would; its directory stays. Waits for its end."""
        self._refuse_forked()
        if self._process is not None:
            self._process.kill()
            self._process.wait(_KILL_WAIT_S)
            self._process = None

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM: it drains and exits; SIGKILL after timeout_s. Returns its exit status."""
        process = self._running()
        process.terminate()
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait(_KILL_WAIT_S)
        self._process = None
        return status

    def remove(self) -> None:
        """Kills it if it runs, and removes its directory. More than once is once. In a process that
        was forked off: nothing, so that a worker which fails inside the block takes nothing from
        its parent."""
        if self._forked:
            return
        self.kill()
        self._folder.remove()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        # No flush for an arena that goes away; an NVMe tier of the caller's is flushed.
        try:
            if self._process is not None and self._settings.get("nvme_dir") and not self._forked:
                self.stop()
        finally:
            self.remove()

    def _spawn(self, answer: int) -> subprocess.Popen[bytes]:
        # As a configuration file, because there an unknown setting is refused.
        file = self._folder.path / "settings.toml"
        lines = [f"{_toml(name)} = {_toml(value)}" for name, value in self._settings.items()]
        # A surrogate, of a path that is no text, is refused where it is read.
        file.write_text("\n".join(lines), encoding="utf-8", errors="backslashreplace")
        options = {
            "config": str(file),
            "parent": os.getpid(),
            "answer": answer,
            "lock": str(self._folder.lock_path),
        }
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self._command(json.dumps(options)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(answer,),
                start_new_session=True,  # an interrupt from the terminal is the parent's to handle
            )

    def _command(self, options: str) -> list[str]:
        """Of the process that serves, kvwarehouse/embedded/__main__.py, with its one argument."""
        # -P: a source tree in the working directory must not hide the installed package.
        return [sys.executable, "-P", "-m", "kvwarehouse.embedded", options]

    def _await(self, answer: int) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        said = b""
        while said != _READY:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([answer], [], [], left_s)[0]:
                raise self._not_up("start_timeout", f"not serving in {self._start_timeout_s:g} s")
            more = os.read(answer, _ANSWER_BYTES)
            if not more:
                raise _refused(said) or self._not_up("start_failed", self._ended())
            said += more

    def _not_up(self, code: str, what: str) -> TransportError:
        return TransportError(
            f"the private daemon did not come up ({what}); the end of its log:\n{self._log_tail()}",
            code=code,
            retryable=False,
        )

    def _ended(self) -> str:
        """How, of a process that has closed what it answers by: a crash writes no log."""
        try:
            status = self._running().wait(_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its end of the pipe, and does not end"
        if status >= 0:
            return f"it ended with status {status}"
        return f"it was ended by {signal.Signals(-status).name}"

    def _log_tail(self) -> str:
        data = self.log_path.read_bytes() if self.log_path.exists() else b""
        return data[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._owner

    def _refuse_forked(self) -> None:
        if self._forked:
            raise UsageError(
                f"this private daemon is process {self._owner}'s, and only that starts and stops"
                " it; a forked process may connect to its address",
                code="forked",
            )

    def _running(self) -> subprocess.Popen[bytes]:
        self._refuse_forked()
        if self._process is None:
            raise UsageError("the private daemon is not running; start it first", code="stopped")
        return self._process


def _toml(value: Any) -> str:
    """A value as TOML writes it. Its strings are JSON's, but TOML refuses the pair of escapes that
    JSON may have for one character, and DEL without an escape."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _refused(said: bytes) -> Exception | None:
    """The error that the daemon refused to start with, as it told it."""
    try:
        error = json.loads(said)
        return from_native(error["kind"], error["code"], error["message"])
    except (ValueError, KeyError, TypeError):
        return None
