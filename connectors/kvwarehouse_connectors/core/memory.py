"""Moving blocks between an engine's cache and the warehouse; here, a cache in host memory.

On the CPU a load copies straight from the arena into the blocks, and a store gathers them with one
native call. device_memory.py has caches on other devices, pinned_memory.py those on GPUs that pages
go straight to.

`gather` and `copy` run in the engine's thread; `load` in the connector's, for blocks that nobody
else uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.layout import BlockLayout
from kvwarehouse_connectors.core.page_run import PageRun


class BlockMemory(Protocol):
    """The blocks of one cache group."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def takes_loads_at_once(self) -> bool:
        """Whether several threads may load parts of a run side by side."""
        ...

    @property
    def copies_on_device(self) -> bool:
        """Whether a store reads what `copy` returns; else rows that were gathered."""
        ...

    def copy(self, blocks: Sequence[int]) -> kvw.Regions:
        """A copy of blocks in the memory of their device, as they are after what the engine has
        queued, of block_bytes each; for a store, in any thread. Only where copies_on_device.
        Raises CapacityError where the device has no memory for it."""
        ...

    def store_failed(self, error: kvw.WarehouseError) -> None:
        """A store of such a copy raised this."""
        ...

    def gather(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Copies blocks to the rows of `out`, as they are after what the engine has queued. Done
        when `settle` has returned."""
        ...

    def settle(self) -> None:
        """Waits for the gathers so far. May be called by another thread."""
        ...

    def after_engine(self) -> None:
        """What is loaded from now on comes after what the engine has queued. In its thread."""
        ...

    def engine_done(self, timeout_s: float) -> float | None:
        """Waits for that, without holding up the engine's stream: the seconds it took, None where
        it was not done in time. 0 where a load itself is what waits."""
        ...

    def scatter(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Overwrites blocks with rows. Done when it returns."""
        ...

    def load(
        self, space: kvw.OpenNamespace, run: PageRun, begin: int, shard: int, timeout_s: float
    ) -> kvw.Loaded:
        """Fills the run's blocks from place `begin` on, in order, from the warehouse. When
        it returns or raises nothing writes them any more, but where device_copies.may_still_write
        says so."""
        ...


class RowsOnly:
    """What a memory answers whose stores gather rows, and whose loads wait for the engine
    themselves, where they have to."""

    @property
    def copies_on_device(self) -> bool:
        return False

    def copy(self, blocks: Sequence[int]) -> kvw.Regions:
        raise AssertionError("blocks of this memory are gathered")

    def store_failed(self, error: kvw.WarehouseError) -> None:
        return None

    def engine_done(self, timeout_s: float) -> float | None:
        return 0.0


class HostMemory(RowsOnly):
    """A cache in host memory. Copies are done when a call returns."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout

    @property
    def block_bytes(self) -> int:
        return self._layout.block_bytes

    @property
    def takes_loads_at_once(self) -> bool:
        return True

    def gather(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        self._layout.regions(blocks).gather(out)

    def settle(self) -> None:
        return None

    def after_engine(self) -> None:
        return None

    def scatter(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self._layout.regions(blocks).scatter(rows)

    def load(
        self, space: kvw.OpenNamespace, run: PageRun, begin: int, shard: int, timeout_s: float
    ) -> kvw.Loaded:
        regions = self._layout.regions(run.blocks[begin:])
        return space.load(keys=run.key_runs(begin), out=regions, shard=shard, timeout_s=timeout_s)
