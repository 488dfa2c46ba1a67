"""Where transfers land before anything is believed of them, and how verified pages leave from
there.

Host memory, verified by the native core in the same pass as the copy; or a device's, verified by
the device.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvwarehouse.client.namespace import OpenNamespace
from kvwarehouse.client.regions import Regions
from kvwarehouse.client.transport import shared_memory_of
from kvwarehouse.gpu.driver import DeviceBytes
from kvwarehouse.undumped import leave_out

if TYPE_CHECKING:
    from kvwarehouse import core

STAGE_BYTES = 32 << 20
"""Of each of two: one is filled while the other is verified."""


class StagingArea(Protocol):
    stage_bytes: int
    """Of each of the stages, which are numbered 0 and 1."""

    def part(self, turn: int, at_bytes: int, size_bytes: int) -> Any:
        """A piece of a stage, as a file reader fills it."""
        ...

    def deliver(
        self,
        turn: int,
        extents: core.Extents,
        first: int,
        count: int,
        out: Regions,
        timeout_s: float,
    ) -> int:
        """Verifies pages [first, first + count), which have landed in stage `turn`, and copies them
        to the same pages of `out`, to the first that fails, or that cannot be begun with within
        timeout_s. Returns how many are there, when the stage may be filled again. Counts them in
        the session."""
        ...


class HostStagingArea:
    """Two stages in host memory. One load at a time."""

    def __init__(self, stage_bytes: int = STAGE_BYTES) -> None:
        self.stage_bytes = stage_bytes
        # Anonymous mappings begin at a page's boundary, as O_DIRECT wants it.
        self._stages = [
            np.frombuffer(mmap.mmap(-1, stage_bytes, mmap.MAP_PRIVATE), np.uint8) for _ in range(2)
        ]
        for stage in self._stages:
            leave_out(stage)

    def part(self, turn: int, at_bytes: int, size_bytes: int) -> Any:
        return self._stages[turn][at_bytes : at_bytes + size_bytes]

    def deliver(
        self,
        turn: int,
        extents: core.Extents,
        first: int,
        count: int,
        out: Regions,
        timeout_s: float,
    ) -> int:
        return extents.deliver(self._stages[turn], first, count, out.native())


class DeviceStagingArea:
    """Two stages in the memory of one device, freed with it. One load at a time.

    The device digests each page while it scatters it to the blocks where it is wanted, and a page
    counts when the digest is that of its record. Its bytes do not cross the bus again.

    opened: a namespace at a daemon of this host. ordinal: the device, as CUDA counts them in this
    process. Blocks for a second the first time in a process, when the kernels are compiled. Raises
    UsageError as kvwarehouse.gpu.prepare, CapacityError (code "gpu_memory")."""

    def __init__(self, opened: OpenNamespace, ordinal: int, stage_bytes: int = STAGE_BYTES) -> None:
        self.stage_bytes = stage_bytes
        memory = shared_memory_of(opened)
        self._stages = [memory.device_stage(ordinal, stage_bytes) for _ in range(2)]

    def part(self, turn: int, at_bytes: int, size_bytes: int) -> DeviceBytes:
        return DeviceBytes(self._stages[turn].address + at_bytes, size_bytes)

    def deliver(
        self,
        turn: int,
        extents: core.Extents,
        first: int,
        count: int,
        out: Regions,
        timeout_s: float,
    ) -> int:
        return self._stages[turn].deliver(extents, first, count, out.native(), timeout_s)
