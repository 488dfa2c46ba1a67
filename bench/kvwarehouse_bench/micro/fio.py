"""What the disk itself does, by fio: direct I/O of one file, same block size, depth and engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from kvwarehouse.errors import StorageError

DEPTH = 8
_TIMEOUT_S = 300
# The arena lies in huge pages, so fio's buffers do too: from 4 KiB pages the same disk gave fio a
# third to two thirds of the rate, and took two to five times the processor. fio 3.33 takes them
# from malloc, so malloc has to want huge pages (glibc 2.35 and later; others ignore it).
_HUGE_PAGE_BYTES = 2 << 20
_HUGE_BUFFERS = "glibc.malloc.hugetlb=1"
# For a pool of threads there is no engine of the same kind that keeps a depth.
_ENGINES = {"io_uring": "io_uring", "pread": "libaio"}
# fio cuts off what is less than a millisecond of its processor time, of the user's and of the
# system's, and a pass of large blocks takes two to five: a read is of the same part eight times.
_READ_LOOPS = 8


@dataclass(frozen=True)
class Pass:
    """Of one pass over the file: by the clock, and what fio's job took of the processor."""

    seconds: float
    processor_s: float


@dataclass(frozen=True)
class Disk:
    """A file of `file_bytes` in `folder`, of which each pass moves `moved_bytes`: a write the next
    part, a read the first, which the page cache of a host below this machine has as often as what
    else is read again and again. engine: the warehouse's name of its own."""

    folder: str
    file_bytes: int
    moved_bytes: int
    block_bytes: int
    engine: str
    _written: Iterator[int] = field(default_factory=count, init=False, compare=False)

    @staticmethod
    def measurable() -> bool:
        return shutil.which("fio") is not None

    @property
    def name(self) -> str:
        return f"fio, same blocks, depth {DEPTH}, {_ENGINES[self.engine]}"

    def fill(self) -> None:
        """Writes all of the file: a part that was never written would take longer."""
        self._fio(["--rw=write", f"--size={self.file_bytes}", "--end_fsync=1"])

    @property
    def _parts(self) -> int:
        return self.file_bytes // self.moved_bytes

    def run(self, direction: str) -> Pass:
        """One pass, of reads the mean of eight; "write" ends in a sync. Raises StorageError with
        what fio said."""
        job = self.job(direction)
        passes = _READ_LOOPS if direction == "read" else 1
        milliseconds: float = job["job_runtime"] if direction == "write" else 0
        # fio counts whole ones.
        milliseconds = max(milliseconds or job[direction]["runtime"], 1)
        share = (job["usr_cpu"] + job["sys_cpu"]) / 100
        return Pass(milliseconds / 1000 / passes, job["job_runtime"] / 1000 * share / passes)

    def job(self, direction: str) -> dict[str, Any]:
        """The job of `run`, as fio reports it."""
        size = f"--size={self.moved_bytes}"
        if direction == "write":
            part = next(self._written) % self._parts
            return self._fio(
                ["--rw=write", size, f"--offset={part * self.moved_bytes}", "--end_fsync=1"]
            )
        # Reads alone, by a job that might write: fio touches the memory of such a one before it
        # looks at the clock. Else each page of it is made, and made zero, during the first reads.
        return self._fio(["--rw=rw", size, "--rwmixread=100", f"--loops={_READ_LOOPS}"])

    def _fio(self, arguments: list[str]) -> dict[str, Any]:
        command = [
            "fio",
            "--name=kvw",
            "--output-format=json",
            f"--filename={Path(self.folder, 'fio.bin')}",
            f"--filesize={self.file_bytes}",
            f"--bs={self.block_bytes}",
            f"--iodepth={DEPTH}",
            f"--ioengine={_ENGINES[self.engine]}",
            f"--iomem_align={_HUGE_PAGE_BYTES}",
            "--direct=1",
            "--invalidate=1",
            *arguments,
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=os.environ | {"GLIBC_TUNABLES": _tunables()},
        )
        try:
            job: dict[str, Any] = json.loads(done.stdout)["jobs"][0]
            if job["error"]:
                raise ValueError(f"error {job['error']}")
        except (ValueError, KeyError, IndexError) as error:
            said = (done.stderr or done.stdout)[-500:]
            raise StorageError(f"fio failed ({error}): {said}", code="fio") from error
        return job


def _tunables() -> str:
    """Of the C library below fio: the user's own, and huge buffers."""
    return ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), _HUGE_BUFFERS]))
