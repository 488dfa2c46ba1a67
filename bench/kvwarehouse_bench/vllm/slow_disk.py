"""A disk whose speed can be chosen, for a private daemon: slow_disk.c, compiled on the spot and
preloaded into it. Needs a C compiler. One owner."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvwarehouse.errors import UsageError

_SOURCE = Path(__file__).with_suffix(".c")
_COMPILE_S = 60


class SlowDisk:
    """folder: what lies below it is slow to read. scratch: where the shim is built."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder = folder.resolve()
        self._rate = scratch / "disk-rate"
        self._rate.write_bytes(struct.pack("<Q", 0))
        self._shim = scratch / "slow_disk.so"
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise UsageError("a slow disk needs a C compiler; install cc", code="no_compiler")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(self._shim), str(_SOURCE), "-ldl"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_S, check=False
        )
        if done.returncode:
            raise UsageError(f"slow_disk.c: {done.stderr[-500:]}", code="no_compiler")

    def turn_to(self, bytes_per_s: float) -> None:
        """0: as fast as the disk is. Applies to reads that begin after it."""
        with self._rate.open("r+b") as file:
            file.write(struct.pack("<Q", int(bytes_per_s)))

    @contextlib.contextmanager
    def preloaded(self) -> Iterator[None]:
        """Processes that are started inside have the slow disk."""
        added = {
            "LD_PRELOAD": " ".join(filter(None, [str(self._shim), os.environ.get("LD_PRELOAD")])),
            "KVW_SLOW_DIR": str(self._folder),
            "KVW_SLOW_RATE": str(self._rate),
        }
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
