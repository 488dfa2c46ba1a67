"""A cache with its memory as connectors have it, and a buffer for where the straight way is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.core.device_copies import DeviceCopies
from kvwarehouse_connectors.core.memory import RowsOnly
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.pinned_memory import PinnedMemory
from kvwarehouse_connectors.core.store_queue import StoreQueue
from pinned_parts.cache import Cache, cache_of
from testkit.cuda_model import ModelDevice
from testkit.cuda_tensors import ModelStream

STAGING_BYTES = 8 << 20
TIMEOUT_S = 60.0


class Buffer(RowsOnly):
    """Stands in for DeviceMemory, whose operations the model's tensors do not have."""

    takes_loads_at_once = False

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.block_bytes = cache.layout.block_bytes
        self.gathers = self.loads = 0

    def gather(self, blocks: Any, out: Any) -> None:
        self.gathers += 1
        out[:] = self._cache.pages()[list(blocks)]

    def settle(self) -> None:
        pass

    def after_engine(self) -> None:
        pass

    def scatter(self, blocks: Any, rows: Any) -> None:
        device, layout = self._cache.memories[0].device, self._cache.layout
        for block, row in zip(blocks, rows, strict=True):
            at = 0
            for base, stride, size in zip(
                layout.bases, layout.strides, layout.piece_bytes, strict=True
            ):
                device.poke(int(base) + block * int(stride), row[at : at + int(size)])
                at += int(size)

    def load(
        self, space: kvw.OpenNamespace, run: PageRun, begin: int, shard: int, timeout_s: float
    ) -> kvw.Loaded:
        self.loads += 1
        rows = np.zeros((len(run.blocks) - begin, self.block_bytes), np.uint8)
        loaded = space.load(keys=run.key_runs(begin), out=rows, shard=shard, timeout_s=timeout_s)
        self.scatter(run.blocks[begin : begin + int(loaded)], rows[: int(loaded)])
        return loaded


def space_of(page_bytes: int) -> kvw.Namespace:
    return kvw.Namespace(
        model="pinned",
        weights="w",
        dtype="any",
        layout="t/1",
        page_tokens=16,
        page_bytes=page_bytes,
    )


class Rig:
    """A cache, its memory as connectors have it, and what a test asks of both."""

    def __init__(
        self,
        device: ModelDevice,
        connection: DaemonConnection,
        rng: random.Random,
        name: str,
        dtype: str,
        path: kvw.gpu.AutoPath | None = None,
    ) -> None:
        self.device, self.rng = device, rng
        self.cache = cache_of(device, name, dtype, rng)
        self.fallbacks = 0
        self.copies = DeviceCopies(0, self._fell_back, path)
        self.buffer = Buffer(self.cache)
        self.memory = PinnedMemory(self.cache.layout, self.buffer, self.copies, ModelStream(device))
        self.space = space_of(self.memory.block_bytes)
        self.results: list[kvw.StoreResult] = []
        self.store_queue = StoreQueue(
            connection,
            SimpleNamespace(staging_bytes=STAGING_BYTES, store_timeout_s=TIMEOUT_S),
            0,
            lambda runs, result: self.results.append(result),
        )
        opened = connection.wait_namespace(self.space, TIMEOUT_S)
        assert opened is not None
        self.opened = opened

    def _fell_back(self) -> None:
        self.fallbacks += 1

    def run(self, *blocks: int) -> PageRun:
        return PageRun(0, [self.rng.randbytes(32) for _ in blocks], list(blocks), True)

    def stored(self, count: int = 1) -> list[kvw.StoreResult]:
        eventually(lambda: len(self.results) == count, "what is queued is stored")
        return self.results

    def wipe(self) -> None:
        for memory in self.cache.memories:
            memory.fill(np.zeros(memory.size_bytes, np.uint8))

    def on_host(self, run: PageRun) -> np.ndarray[Any, np.dtype[np.uint8]]:
        rows = np.zeros((len(run.keys), self.memory.block_bytes), np.uint8)
        assert self.opened.load(keys=run.key_runs(), out=rows) == len(rows)
        return rows


Make = Callable[..., Rig]
