"""The parts of bench/gpu.py by their names, each as large as this machine has room for; it says
what it left out. One that fails is no reason for the others not to run.
"""

from __future__ import annotations

import argparse
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvwarehouse.errors import UsageError
from kvwarehouse.gpu import Machine
from kvwarehouse.host import available_bytes
from kvwarehouse_bench.gpu import hbm as hbm_part
from kvwarehouse_bench.gpu.device_pages import TorchCard
from kvwarehouse_bench.gpu.goals import PartOutcome
from kvwarehouse_bench.gpu.nvme import nvme
from kvwarehouse_bench.gpu.pinned import PinnedWork, pinned
from kvwarehouse_bench.gpu.ttft import SHAPES, tier_bytes, ttft
from kvwarehouse_bench.harness.frame import numbers

_SHARED_MEMORY = Path("/dev/shm")
_USED = 0.8
"""Of what is free: a model is loaded by way of the host's memory, and a disk that is full is
slow."""
_LEAST_BYTES = 64 << 20

LENGTHS, _QUICK_LENGTHS = "1024,4096,16384,32768,65536,131072", "1024,2048"
_STORED_BYTES, _QUICK_STORED_BYTES = 4 << 30, 128 << 20
_MOVED_BYTES, _QUICK_MOVED_BYTES = 1 << 30, 64 << 20
_TIER_TIMES = 4
"""Of what pinned and hbm move: what they store again and again, with what is being cleared."""
_MOST_TEXT = 300


@dataclass(frozen=True)
class TierRoom:
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


def room_of(folder: Path) -> TierRoom:
    """folder: on the disk that parts write to."""
    free = shutil.disk_usage(_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else folder).free
    memory = min(free, available_bytes())
    return TierRoom(int(_USED * memory), int(_USED * shutil.disk_usage(folder).free))


@dataclass(frozen=True)
class PartRequest:
    """What a part is given."""

    args: argparse.Namespace
    machine: Machine
    room: TierRoom
    folder: Path
    """Its own; it goes away again."""

    @property
    def rounds(self) -> int:
        return 1 if self.args.quick else int(self.args.rounds)


Part = Callable[[PartRequest], PartOutcome]


def chosen(text: str | None) -> list[str]:
    """Of a list with commas; in their order. None: all."""
    names = list(PARTS) if text is None else text.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise UsageError(
            f"--parts {text}: no part {', '.join(unknown)}; there are {', '.join(PARTS)}",
            code="bad_bench",
        )
    return [name for name in PARTS if name in names]


def lengths_of(args: argparse.Namespace) -> list[int]:
    given = args.lengths or (_QUICK_LENGTHS if args.quick else LENGTHS)
    return numbers(given, "--lengths", 1024, 1 << 20)


def tried(name: str, part: Part, asked: PartRequest) -> tuple[PartOutcome, bool]:
    """What the part found, and whether it came to its end. One that raised has the reason for an
    outcome; where it was is told on stderr."""
    if not asked.machine.has_device:
        return PartOutcome(name, why_not=asked.machine.describe()[0]), True
    try:
        return part(asked), True
    except Exception as error:  # noqa: BLE001 - whatever it was, the other parts go on
        traceback.print_exc()
        why = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_TEXT]
        return PartOutcome(name, why_not=why), False


def _pinned(asked: PartRequest) -> PartOutcome:
    wanted = _QUICK_MOVED_BYTES if asked.args.quick else _MOVED_BYTES
    moved = asked.room.largest(wanted, _TIER_TIMES + 1, 0)  # and the page-locked memory
    if not moved:
        return _no_room("pinned", asked)
    found = pinned(TorchCard(), asked.folder, PinnedWork(moved, rounds=asked.rounds))
    return _smaller(found, wanted, moved, asked)


def _hbm(asked: PartRequest) -> PartOutcome:
    wanted = _QUICK_MOVED_BYTES if asked.args.quick else _MOVED_BYTES
    moved = asked.room.largest(wanted, _TIER_TIMES, 0)
    if not moved:
        return _no_room("hbm", asked)
    found = hbm_part.hbm(TorchCard(), asked.folder, hbm_part.HbmWork(moved, rounds=asked.rounds))
    return _smaller(found, wanted, moved, asked)


def _nvme(asked: PartRequest) -> PartOutcome:
    wanted = _QUICK_STORED_BYTES if asked.args.quick else _STORED_BYTES
    stored = asked.room.largest(wanted, 0, 2)
    if not stored:
        return _no_room("nvme", asked)
    return _smaller(nvme(asked.machine, asked.folder, stored), wanted, stored, asked)


def _ttft(asked: PartRequest) -> PartOutcome:
    lengths = lengths_of(asked.args)
    shape = SHAPES[asked.args.model or ("tiny" if asked.args.quick else "8b")]
    fitting = asked.room.prompts(lengths, shape.kv_bytes_per_token)
    if not fitting:
        return _no_room("ttft", asked)
    found = ttft("cuda", shape, fitting, asked.rounds, asked.folder)
    left = [tokens for tokens in lengths if tokens not in fitting]
    if not left:
        return found
    told = f"{', '.join(map(str, left))} tokens do not fit: {asked.room.words()}"
    return _noted(found, told)


def _no_room(name: str, asked: PartRequest) -> PartOutcome:
    return PartOutcome(name, why_not=f"there is no room: {asked.room.words()}")


def _smaller(found: PartOutcome, wanted: int, size: int, asked: PartRequest) -> PartOutcome:
    if size == wanted:
        return found
    told = f"measured with {size >> 20} MiB instead of {wanted >> 20}: {asked.room.words()}"
    return _noted(found, told)


def _noted(found: PartOutcome, told: str) -> PartOutcome:
    return replace(found, why_not="; ".join(filter(None, (found.why_not, told))))


PARTS: Mapping[str, Part] = {"pinned": _pinned, "hbm": _hbm, "nvme": _nvme, "ttft": _ttft}
