"""What the disk itself does, by fio: direct I/O of one file, same block size, depth and engine."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvwarehouse.errors import StorageError

DEPTH = 8
_TIMEOUT_S = 300
# For a pool of threads there is no engine of the same kind that keeps a depth.
_ENGINES = {"io_uring": "io_uring", "pread": "libaio"}


@dataclass(frozen=True)
class Pass:
    """Of one pass over the file: by the clock, and what fio's job took of the processor."""

    seconds: float
    processor_s: float


@dataclass(frozen=True)
class Disk:
    """A file of `size_bytes` in `folder`, read or written from end to end each time. engine: the
    warehouse's name of its own."""

    folder: str
    size_bytes: int
    block_bytes: int
    engine: str

    @staticmethod
    def measurable() -> bool:
        return shutil.which("fio") is not None

    @property
    def name(self) -> str:
        return f"fio, same blocks, depth {DEPTH}, {_ENGINES[self.engine]}"

    def run(self, direction: str) -> Pass:
        """One pass; "write" ends in fdatasync. Raises StorageError with what fio said."""
        job = self._job(direction)
        milliseconds: float = job["job_runtime"] if direction == "write" else 0
        # fio counts whole ones.
        milliseconds = max(milliseconds or job[direction]["runtime"], 1)
        share = (job["usr_cpu"] + job["sys_cpu"]) / 100
        return Pass(milliseconds / 1000, job["job_runtime"] / 1000 * share)

    def _job(self, direction: str) -> dict[str, Any]:
        command = [
            "fio",
            "--name=kvw",
            "--output-format=json",
            f"--filename={Path(self.folder, 'fio.bin')}",
            f"--rw={direction}",
            f"--bs={self.block_bytes}",
            f"--size={self.size_bytes}",
            f"--iodepth={DEPTH}",
            f"--ioengine={_ENGINES[self.engine]}",
            "--direct=1",
            "--invalidate=1",
        ]
        if direction == "write":
            command.append("--end_fsync=1")
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        try:
            job: dict[str, Any] = json.loads(done.stdout)["jobs"][0]
            if job["error"]:
                raise ValueError(f"error {job['error']}")
        except (ValueError, KeyError, IndexError) as error:
            said = (done.stderr or done.stdout)[-500:]
            raise StorageError(f"fio failed ({error}): {said}", code="fio") from error
        return job
