"""What a machine has free for the tiers of a part's daemon: a part measures as much as fits, and
says what it left out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvwarehouse_bench.gpu.ttft import tier_bytes

_SHARED_MEMORY = Path("/dev/shm")
_MEMINFO = Path("/proc/meminfo")
_USED = 0.8
"""Of what is free: a model is loaded by way of the host's memory, and a disk that is full is
slow."""
_LEAST_BYTES = 64 << 20


@dataclass(frozen=True)
class Room:
    memory_bytes: int
    disk_bytes: int

    def words(self) -> str:
        memory, disk = self.memory_bytes / 1e9, self.disk_bytes / 1e9
        return f"{memory:.1f} GB of shared memory and {disk:.1f} GB of the disk may be used"

    def largest(self, wanted_bytes: int, memory_times: float, disk_times: float) -> int:
        """wanted_bytes, halved until its tiers fit, which take so many times as much; 0 where that
        is too little to measure with."""
        size = wanted_bytes
        while size * memory_times > self.memory_bytes or size * disk_times > self.disk_bytes:
            size //= 2
        return size if size >= min(wanted_bytes, _LEAST_BYTES) else 0

    def prompts(self, lengths: Sequence[int], kv_bytes_per_token: int) -> list[int]:
        """Of these lengths in tokens, those that fit both tiers."""
        most = min(self.memory_bytes, self.disk_bytes)
        return [tokens for tokens in lengths if tier_bytes(tokens, kv_bytes_per_token) <= most]


def room_of(folder: Path) -> Room:
    """folder: on the disk that parts write to."""
    free = shutil.disk_usage(_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else folder).free
    memory = min(free, _available_bytes())
    return Room(int(_USED * memory), int(_USED * shutil.disk_usage(folder).free))


def _available_bytes() -> int:
    for line in _MEMINFO.read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    raise RuntimeError(f"{_MEMINFO} has no MemAvailable")
