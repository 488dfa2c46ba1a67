"""What the disk itself does, by fio: direct I/O of one file, same block size and depth."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvwarehouse.errors import StorageError

DEPTH = 8
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Disk:
    """A file of `size_bytes` in `folder`, read or written from end to end each time."""

    folder: str
    size_bytes: int
    block_bytes: int

    @staticmethod
    def measurable() -> bool:
        return shutil.which("fio") is not None

    def seconds(self, direction: str) -> float:
        """Of one pass; "write" ends in fdatasync. Raises StorageError with what fio said."""
        command = [
            "fio",
            "--name=kvw",
            "--output-format=json",
            f"--filename={Path(self.folder, 'fio.bin')}",
            f"--rw={direction}",
            f"--bs={self.block_bytes}",
            f"--size={self.size_bytes}",
            f"--iodepth={DEPTH}",
            "--ioengine=libaio",
            "--direct=1",
            "--invalidate=1",
        ]
        if direction == "write":
            command.append("--end_fsync=1")
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        try:
            job = json.loads(done.stdout)["jobs"][0]
            if job["error"]:
                raise ValueError(f"error {job['error']}")
            milliseconds: float = job["job_runtime"] if direction == "write" else 0
            return (milliseconds or job[direction]["runtime"]) / 1000
        except (ValueError, KeyError, IndexError) as error:
            said = (done.stderr or done.stdout)[-500:]
            raise StorageError(f"fio failed ({error}): {said}", code="fio") from error
