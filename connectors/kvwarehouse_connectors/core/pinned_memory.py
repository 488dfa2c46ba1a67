"""A cache on a GPU whose pages go straight between its memory and the pinned arena (docs/gpu.md).

A load writes the blocks where they lie, after an event behind what the engine had queued when it
was ordered. A store must not read them where they lie: it ends long after its step, when they may
hold another request's tokens. So they are copied within the device's memory, in the engine's own
stream, and the store reads the copy after an event behind it. Nothing waits on that stream, and
that stream waits for nothing.

What the device refuses goes through the host buffer of `host` instead, for good (device_copies.py).
memory.py says what the methods promise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.device_copies import DeviceCopies, EngineStream
from kvwarehouse_connectors.core.layout import BlockLayout
from kvwarehouse_connectors.core.memory import BlockMemory
from kvwarehouse_connectors.core.page_run import PageRun


class PinnedMemory:
    """host: the same blocks, by the way through a buffer. copies may be shared by all groups of a
    device, with the kernels that copy within it. Raises as kvw.gpu.DeviceGather."""

    def __init__(
        self,
        layout: BlockLayout,
        host: BlockMemory,
        copies: DeviceCopies,
        stream: EngineStream,
    ) -> None:
        self._layout = layout
        self._host = host
        self._copies = copies
        self._gather = copies.gather
        self._stream = stream
        self._ready: Any = None

    @property
    def block_bytes(self) -> int:
        return self._layout.block_bytes

    @property
    def takes_loads_at_once(self) -> bool:
        return False  # one load fills the bus

    @property
    def copies_on_device(self) -> bool:
        return self._copies.usable

    def copy(self, blocks: Sequence[int]) -> kvw.Regions:
        try:
            copy = self._stream.gathered(self._layout.regions(blocks), self._gather)
        except RuntimeError as error:
            if not self._stream.out_of_memory(error):
                raise
            raise kvw.CapacityError(
                f"the device has no memory for a copy of {len(blocks)} blocks of"
                f" {self.block_bytes} bytes; lower staging_bytes, or leave more beside the cache",
                code="gpu_memory",
            ) from error
        except kvw.WarehouseError as error:
            if not self._copies.refused(error):
                raise
            raise kvw.CapacityError(str(error), code=error.code) from error
        size = [self.block_bytes]
        rows = np.arange(len(blocks), dtype=np.int64).reshape(-1, 1)
        copied = kvw.Regions.strided([copy], [copy.data_ptr()], size, size, rows)
        return self._copies.placed(copied, self._stream.recorded())

    def store_failed(self, error: kvw.WarehouseError) -> None:
        # The copy's memory may be let go: a device that hangs only reads it.
        self._copies.refused(error)

    def gather(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        self._host.gather(blocks, out)

    def settle(self) -> None:
        self._host.settle()

    def after_engine(self) -> None:
        self._host.after_engine()
        if self._copies.usable:
            self._ready = self._stream.recorded()

    def engine_done(self, timeout_s: float) -> float | None:
        began = time.monotonic()
        try:
            if not self._copies.reached(self._ready, timeout_s):
                return None
        except kvw.WarehouseError as error:
            # The host's way waits for the engine by itself.
            if not self._copies.refused(error):
                raise
        return time.monotonic() - began

    def scatter(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        self._host.scatter(blocks, rows)

    def load(
        self, space: kvw.OpenNamespace, run: PageRun, begin: int, shard: int, timeout_s: float
    ) -> kvw.Loaded:
        if self._copies.usable:
            try:
                out = self._copies.placed(self._layout.regions(run.blocks[begin:]), self._ready)
                return self._copies.load(
                    space, keys=run.key_runs(begin), out=out, shard=shard, timeout_s=timeout_s
                )
            except kvw.WarehouseError as error:
                if not self._copies.refused(error):
                    raise
        return self._host.load(space, run, begin, shard, timeout_s)
