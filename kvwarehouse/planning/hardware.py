"""GPUs by name, and how fast the tiers are. Read-only values; thread-safe.

The figures are those of the makers' data sheets: dense 16-bit matrix rate (without sparsity),
memory bandwidth, board power. What of them is reached is a separate, stated assumption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvwarehouse.errors import UsageError
from kvwarehouse.planning.interval import Quantity

GB = 1e9
TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """`host_bytes_per_s` is what its PCIe link carries one way, overheads taken off."""

    name: str
    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    watts: float
    host_bytes_per_s: float


def _gpu(
    name: str, tflops: float, memory: float, bandwidth: float, watts: float, host: float
) -> Gpu:
    """GB and GB/s."""
    return Gpu(name, tflops * TERA, memory * GB, bandwidth * GB, watts, host * GB)


_TABLE = (
    _gpu("a10", 125, 24, 600, 150, 25),
    _gpu("a100-80gb", 312, 80, 2_039, 400, 25),
    _gpu("b200", 2_250, 180, 8_000, 1_000, 50),
    _gpu("h20", 148, 96, 4_000, 400, 50),
    _gpu("h100-sxm", 989, 80, 3_350, 700, 50),
    _gpu("h200", 989, 141, 4_800, 700, 50),
    _gpu("l4", 121, 24, 300, 72, 25),
    _gpu("l40s", 362, 48, 864, 350, 25),
    _gpu("mi300x", 1_307, 192, 5_300, 750, 50),
    _gpu("rtx-4090", 165, 24, 1_008, 450, 25),
)
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}
_ALIASES = {"a100": "a100-80gb", "h100": "h100-sxm", "4090": "rtx-4090"}


def find_gpu(name: str) -> Gpu:
    """Raises UsageError that lists the known ones."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    gpu = GPUS.get(_ALIASES.get(plain, plain))
    if gpu is None:
        raise UsageError(
            f"the GPU {name!r} is not in the table; use one of {', '.join(GPUS)}, or give measured"
            " rates with the nearest of them",
            code="unknown_gpu",
        )
    return gpu


@dataclass(frozen=True)
class TierSpeed:
    """What one tier delivers to and takes from all GPUs of the host together, in bytes a second,
    and how long it takes to answer. `assumption` says where the figures are from."""

    name: str
    read: Quantity
    write: Quantity
    latency_s: Quantity
    assumption: str

    def __post_init__(self) -> None:
        for what, rate in (("read", self.read), ("write", self.write)):
            if not (rate.low > 0 and math.isfinite(rate.high)):
                raise UsageError(
                    f"a {what} rate of {rate.value:g} B/s for {self.name} cannot be; give a"
                    " positive one",
                    code="bad_rate",
                )
