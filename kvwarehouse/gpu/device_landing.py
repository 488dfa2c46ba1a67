"""Where transfers into a GPU's memory land, and how pages leave from there: the device digests each
while it scatters it to the blocks where it is wanted, and a page counts when the digest is that of
its record. Its bytes do not cross the bus again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwarehouse.client.opened import OpenNamespace
from kvwarehouse.client.regions import Regions
from kvwarehouse.gpu.choice import Choice
from kvwarehouse.gpu.driver import DeviceMemory
from kvwarehouse.gpu.kvikio_mover import KvikioMover
from kvwarehouse.gpu.landing import STAGE_BYTES
from kvwarehouse.gpu.nvme_reader import NvmeReader
from kvwarehouse.gpu.rates import Lane

if TYPE_CHECKING:
    from kvwarehouse import core


class DeviceLanding:
    """Two stages in the memory of one device, freed with it. One load at a time.

    opened: a namespace at a daemon of this host. ordinal: the device, as CUDA counts them in this
    process. Blocks for a second the first time in a process, when the kernels are compiled. Raises
    UsageError as kvwarehouse.gpu.prepare, CapacityError (code "gpu_memory")."""

    def __init__(self, opened: OpenNamespace, ordinal: int, stage_bytes: int = STAGE_BYTES) -> None:
        self.stage_bytes = stage_bytes
        self._stages = [opened._moves.device_stage(ordinal, stage_bytes) for _ in range(2)]

    def part(self, turn: int, at_bytes: int, size_bytes: int) -> DeviceMemory:
        return DeviceMemory(self._stages[turn].address + at_bytes, size_bytes)

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


def reader(
    opened: OpenNamespace,
    ordinal: int,
    choice: Choice,
    *,
    promotes: bool = False,
    library: Any = None,
) -> NvmeReader | None:
    """Loads of pages on NVMe into the memory of device `ordinal`, by the way that was chosen, for
    namespaces of the client of `opened`; None where that is the daemon's promotion, which is what
    `opened.load` does. The caller closes it.
    promotes: as NvmeReader has it.

    library: in place of the module kvikio. Raises as DeviceLanding and KvikioMover."""
    if choice.lane is Lane.DRAM:
        return None
    mover = KvikioMover(gds=choice.lane is Lane.GDS, library=library)
    landing = DeviceLanding(opened, ordinal)
    return NvmeReader(mover, landing, promotes=promotes)
