"""A real `kvwarehouse serve` process for tests that kill, pause, restart and damage it.

    with Serving(tmp_path, dram="16MiB", nvme_capacity="64MiB") as serving:
        with serving.connect() as client: ...
        serving.kill()
        serving.start()

Its arena is a directory of its own on tmpfs, its NVMe tier `disk/nvme`; both stay over the life of
the process, so that the next start is a restart. One owner; not thread-safe.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S

_SHARED_MEMORY = Path("/dev/shm")
_TAIL_LINES = 12
_ABORT_S = 10.0


class RefusedError(AssertionError):
    """The daemon ended without serving. `status` is its exit status, `text` what it said last."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"kvwarehouse serve ended with {status}: {text}")
        self.status = status
        self.text = text


class Serving:
    def __init__(self, disk: Path, **settings: Any) -> None:
        """`settings`: flags of serve by their names, with _ for -. Sizes as people write them. An
        NVMe tier is there when `nvme_capacity` is. Starts nothing."""
        base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="kvw-test-", dir=base))
        self.settings = {
            "socket": str(self.folder / "kvw.sock"),
            "arena_dir": str(self.folder / "arena"),
            "dram": "16MiB",
            "http": "127.0.0.1:0",
            "log_format": "json",
            **settings,
        }
        if "nvme_capacity" in settings:
            self.settings.setdefault("nvme_dir", str(disk / "nvme"))
        self.environment: dict[str, str] = {}  # of the daemon, beside that of this process
        self.starts = 0
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self._over = False
        self._changed = threading.Condition()
        self._reader: threading.Thread | None = None

    # --- where things are

    @property
    def address(self) -> str:
        return f"unix://{self.settings['socket']}"

    @property
    def socket(self) -> str:
        return str(self.settings["socket"])

    @property
    def arena_dir(self) -> Path:
        return Path(self.settings["arena_dir"])

    @property
    def nvme_dir(self) -> Path:
        return Path(self.settings["nvme_dir"])

    @property
    def segments(self) -> list[Path]:
        return sorted((self.nvme_dir / "segments").glob("*.seg"))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def connect(self, **options: Any) -> kvw.Client:
        """With more time for its calls than a busy machine takes, unless it is given less."""
        return kvw.connect(self.address, **{"timeout_s": DEADLINE_S, **options})

    def connect_remote(self, **options: Any) -> kvw.Client:
        """As a client of another host: over gRPC."""
        from kvwarehouse.client.connect import connect_grpc

        return connect_grpc(self.address, **{"timeout_s": DEADLINE_S, **options})

    # --- life

    def start(self) -> None:
        """Returns when it serves. Raises RefusedError when it ends instead."""
        self.launch()
        if not self.said("ready"):
            raise RefusedError(self._wait(), self.tail())

    def launch(self, *, own_group: bool = False) -> None:
        """Returns at once, whatever becomes of it. `own_group`: for signal_group."""
        assert self._process is None or self._process.poll() is not None, "it runs already"
        self._lines, self._over = [], False
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVW_")}
        environment["PYTHONFAULTHANDLER"] = "1"  # SIGABRT: where each of its threads is
        environment.update(self.environment)
        self._process = subprocess.Popen(
            self.command(),
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",  # whatever it is made to say
            env=environment,
            process_group=0 if own_group else None,
        )
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr,))
        self._reader.start()
        self.starts += 1

    def command(self) -> list[str]:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]
        # -P: a source tree in the working directory must not hide the installed package.
        return [sys.executable, "-P", "-m", "kvwarehouse", "serve", *flags]

    def kill(self) -> None:
        """SIGKILL, and its end."""
        if self._process is not None:
            self._process.kill()
            self._wait()

    def stop(self) -> int:
        """SIGTERM: it drains and exits. Returns its exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._wait()

    def ended(self) -> int:
        """Its exit status, when it has ended by itself."""
        return self._wait()

    def signal_group(self, number: int) -> int:
        """As a terminal or a service manager does, to each process of the group that launch() made;
        and the daemon's end. Returns its exit status."""
        os.killpg(self.pid, number)
        return self._wait()

    def pause(self) -> None:
        """Returns when all of its threads stand: on a busy machine they go on behind the signal."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def lose_arena(self) -> None:
        """What a reboot does. The daemon must be down."""
        assert self._process is None
        shutil.rmtree(self.arena_dir)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"the daemon's log ends with: {self.tail()}")
        self.remove()

    # --- what it says

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of this start's log, by name."""
        parsed = [json.loads(line) for line in self._lines if line.startswith("{")]
        return [event for event in parsed if event.get("event") == name]

    def said(self, name: str) -> bool:
        """Waits for the first event of that name, or for the log's end: then False."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.events(name) or self._over, DEADLINE_S)
        if not done:
            self.kill()
            raise AssertionError(f"the daemon neither says {name} nor ends: {self.tail()}")
        return bool(self.events(name))

    def tail(self) -> str:
        return "".join(self._lines[-_TAIL_LINES:]).strip()

    @property
    def lines(self) -> list[str]:
        """This start's log so far."""
        return list(self._lines)

    def metrics(self) -> dict[str, float]:
        """/metrics: name with labels to value."""
        address = self.events("ready")[0]["http"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE_S) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _wait(self) -> int:
        assert self._process is not None
        try:
            status = self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_ABORT_S)
            raise AssertionError(f"the daemon does not end: {''.join(self._lines)}") from None
        assert self._reader is not None
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process = None
        return status
