"""The demo's own daemon: a `kvwarehouse serve` process in temporary directories.

Not thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import kvwarehouse as kvw

_MIB = 1 << 20
_LEAST_DRAM_BYTES = 256 * _MIB
_LEAST_NVME_BYTES = 1024 * _MIB
_SPARE_BYTES = 64 * _MIB
_SHARED_MEMORY = "/dev/shm"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.05
_LOG_TAIL_BYTES = 2000
_SERVE = "import sys; from kvwarehouse.cli import main; sys.exit(main())"


class DemoDaemon:
    """Also a context manager, which starts it and in the end removes everything.

    kv_bytes: what has to fit into each tier. disk: where the directory of the NVMe tier is made.
    Raises UsageError where there is no room."""

    def __init__(self, kv_bytes: int, disk: str | None) -> None:
        dram = max(_LEAST_DRAM_BYTES, _mebibytes(2 * kv_bytes))
        nvme = max(_LEAST_NVME_BYTES, _mebibytes(3 * kv_bytes))
        disk = disk or tempfile.gettempdir()
        self._process: subprocess.Popen[bytes] | None = None
        self._folders: list[Path] = []
        try:
            shelf = self._folder(_memory_folder(dram), "of the DRAM tier", dram)
            self._disk = self._folder(disk, "of the NVMe tier (--dir names another)", nvme)
        except BaseException:
            self.remove()
            raise
        self.arena = shelf / "arena"
        self._socket = shelf / "kvw.sock"
        self._log = self._disk / "daemon.log"
        self._flags = {
            "--socket": str(self._socket),
            "--arena-dir": str(self.arena),
            "--dram": f"{dram}B",
            "--nvme-dir": str(self._disk / "nvme"),
            "--nvme-capacity": f"{nvme}B",
            "--http": "off",
            "--log-format": "json",
        }

    @property
    def address(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> kvw.Client:
        """Starts it; returns a client when it serves. Raises TransportError with the end of its
        log where it does not."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVE, "serve", *_joined(self._flags)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_clean_environment(),
                start_new_session=True,  # an interrupt is the demo's to handle
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(kvw.TransportError):
                client = kvw.connect(self.address)
                try:
                    client.status()
                except BaseException:
                    client.close()
                    raise
                return client
            time.sleep(_POLL_S)
        raise kvw.TransportError(
            f"the demo's daemon does not serve; the end of its log:\n{self._log_tail()}",
            code="start_failed",
            retryable=False,
        )

    def kill(self) -> None:
        """SIGKILL, as a crash would; its directories stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)
            self._process = None

    def stop(self) -> None:
        """SIGTERM: it flushes to NVMe and exits. Raises StorageError where it does not exit 0."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            status = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            status = -1
        self._process = None
        if status:
            raise kvw.StorageError(
                f"the demo's daemon ended with status {status}; the end of its log:\n"
                f"{self._log_tail()}",
                code="stop_failed",
            )

    def drop_dram(self) -> None:
        """Deletes the DRAM tier of a stopped daemon."""
        shutil.rmtree(self.arena)

    def remove(self) -> None:
        """Kills it and removes its directories. More than once is once."""
        self.kill()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _folder(self, parent: str, what: str, size_bytes: int) -> Path:
        try:
            free = shutil.disk_usage(parent).free
            if free < size_bytes + _SPARE_BYTES:
                raise kvw.UsageError(
                    f"{parent} has {free // _MIB} MiB free; the directory {what} needs"
                    f" {(size_bytes + _SPARE_BYTES) // _MIB} MiB. Free some, or use a smaller"
                    " --max-tokens",
                    code="no_room",
                )
            folder = Path(tempfile.mkdtemp(prefix="kvw-demo-", dir=parent))
        except OSError as error:
            raise kvw.UsageError(
                f"no directory {what} can be made in {parent}: {error}", code="no_room"
            ) from error
        self._folders.append(folder)
        return folder

    def _log_tail(self) -> str:
        data = self._log.read_bytes() if self._log.exists() else b""
        return data[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")


def _memory_folder(size_bytes: int) -> str:
    """tmpfs, or a disk's page cache where tmpfs is missing or small (64 MiB in many containers)."""
    usable = os.access(_SHARED_MEMORY, os.W_OK)
    if usable and shutil.disk_usage(_SHARED_MEMORY).free >= size_bytes + _SPARE_BYTES:
        return _SHARED_MEMORY
    return tempfile.gettempdir()


def _clean_environment() -> dict[str, str]:
    """Without the settings of the user's own daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVW_")}


def _joined(flags: Mapping[str, str]) -> list[str]:
    return [part for flag in flags.items() for part in flag]


def _mebibytes(size_bytes: int) -> int:
    return -(-size_bytes // _MIB) * _MIB
