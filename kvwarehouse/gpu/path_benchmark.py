"""How fast each way from NVMe to a device is on this machine: a short measurement, each way in a
process of its own, of bytes that are in the warehouse's segments already. Nothing is written.

Bytes that were allocated and never written are no use: file systems answer those without the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvwarehouse.gpu.probe_process import Told, run_probe

CHILD = "kvwarehouse.gpu.path_benchmark_child"
PATH_TIMEOUT_S = 30.0
MEASURED_BYTES = 256 << 20
LEAST_BYTES = 32 << 20
"""Less says more about the first reads than about the way."""
_BLOCK = 4096


class LoadPath(StrEnum):
    GDS = "gds"
    """cuFile without its own fallback: the disk writes to device memory."""
    COMPAT = "compat"
    """kvikio's own host buffers, and copies to the device."""
    DRAM = "dram"
    """The daemon promotes, the client copies from pinned host memory to the device."""


DISK = "disk"
"""No way to a device: the same reads into host memory alone, as the limit to judge the others
by."""


@dataclass(frozen=True)
class Rates:
    bytes_per_s: Mapping[LoadPath, float] = field(default_factory=dict)
    problems: Mapping[LoadPath, str] = field(default_factory=dict)
    """Of the paths that have no rate."""
    measured_bytes: int = 0
    """Zero: there was too little to measure with, or nothing to measure."""


def measure(
    folder: Path,
    paths: Sequence[LoadPath] = tuple(LoadPath),
    ordinal: int = 0,
    timeout_s: float = PATH_TIMEOUT_S,
    module: str = CHILD,
) -> Rates:
    """folder: the segments'. ordinal: the device. Blocks for at most timeout_s a path; never
    raises."""
    pieces = list(written(folder))
    total = sum(size for _, _, size in pieces)
    if total < LEAST_BYTES:
        why = f"{total} bytes are stored on NVMe, {LEAST_BYTES} are the least to measure with"
        return Rates({}, dict.fromkeys(paths, why))
    rates: dict[LoadPath, float] = {}
    problems: dict[LoadPath, str] = {}
    arguments = [f"{offset}:{size}:{file}" for file, offset, size in pieces]
    for path in paths:
        told = run_probe(module, [path.value, str(ordinal), *arguments], timeout_s)
        values = _values(told)
        if values.get("bytes_per_s"):
            rates[path] = float(values["bytes_per_s"])
            continue
        problems[path] = str(values.get("rate_error") or told.problem or "it said nothing")
    return Rates(rates, problems, total)


def disk_rate(folder: Path, timeout_s: float = PATH_TIMEOUT_S) -> float:
    """Bytes a second of the disk itself, by direct reads into host memory; 0: not measured. Needs
    no device."""
    arguments = [f"{offset}:{size}:{file}" for file, offset, size in written(folder)]
    told = run_probe(CHILD, [DISK, "0", *arguments], timeout_s) if arguments else None
    return float(_values(told).get("bytes_per_s", 0.0)) if told else 0.0


def _values(told: Told) -> dict[str, Any]:
    return {name: value for answer in told.answers for name, value in answer.items()}


def written(folder: Path, most_bytes: int = MEASURED_BYTES) -> Iterator[tuple[Path, int, int]]:
    """(file, offset, bytes) of what was written to the segments, in whole blocks, up to
    most_bytes."""
    left = most_bytes
    for file in sorted(folder.glob("*.seg")):
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            for offset, size in _data(descriptor):
                size = min(size, left) // _BLOCK * _BLOCK
                if size:
                    yield file, offset, size
                    left -= size
        finally:
            os.close(descriptor)
        if left < _BLOCK:
            return


def _data(descriptor: int) -> Iterator[tuple[int, int]]:
    at = 0
    while True:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError:  # ENXIO: no more data; EINVAL: a file system that cannot say
            return
        begin = -(-begin // _BLOCK) * _BLOCK
        if at > begin:
            yield begin, at - begin
