"""The ways that a prompt's KV can come, in two engines: ours beside a warehouse, and vLLM's own
offloading. Each way is prepared for, timed, and checked by vLLM's own count of where tokens came
from.

Not thread-safe.

The peer's memory in /dev/shm: vLLM leaves it there when an engine is killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kvwarehouse_bench.harness.process import ProgramError, wait_for
from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS
from kvwarehouse_bench.vllm.engine import ALONE, PEER_ALONE, VllmEngine
from kvwarehouse_bench.vllm.messages import DEVICE, DISK, HOST, Ask
from kvwarehouse_bench.vllm.results import TtftSample, computed, reused
from kvwarehouse_bench.vllm.warehouse import EngineWarehouse

RECOMPUTED = "recomputed"
PREFIX_CACHE = "prefix cache"
DRAM = "warehouse DRAM"
NVME = "warehouse NVMe"
PEER_RECOMPUTED = "peer recomputed"
PEER_PREFIX_CACHE = "peer prefix cache"
PEER_MEMORY = "peer CPU tier"
PEER_FILES = "peer file tier"

_FILES_WAIT_S = 120.0

_SHARED_MEMORY = Path("/dev/shm")


class EngineContender:
    """One engine, and its ways in the order in which they are measured first."""

    def __init__(self, engine: VllmEngine, alone: Mapping[str, object]) -> None:
        self.engine = engine
        self._alone = alone
        self.ways: dict[str, Callable[[Sequence[int]], TtftSample]] = {}

    def prepare(self, tokens: Sequence[int]) -> None:
        """Computes the prompt and has it stored, in every tier."""
        raise NotImplementedError

    def recomputed(self, tokens: Sequence[int]) -> TtftSample:
        self.engine.forget()
        return computed(tokens, self.engine.ask([Ask(tokens, params=self._alone)]))

    def prefix_cache(self, tokens: Sequence[int]) -> TtftSample:
        """The first time fills vLLM's cache, the second is measured."""
        self.engine.ask([Ask(tokens)])
        return self.timed(tokens, DEVICE, self._alone)

    def timed(
        self, tokens: Sequence[int], source: str, params: Mapping[str, object] | None = None
    ) -> TtftSample:
        return reused(tokens, self.engine.ask([Ask(tokens, params=params or {})]), source)


class WarehouseContender(EngineContender):
    def __init__(self, engine: VllmEngine, warehouse: EngineWarehouse) -> None:
        super().__init__(engine, ALONE)
        self._warehouse = warehouse
        self._pages = 0
        self.ways = {
            RECOMPUTED: self.recomputed,
            PREFIX_CACHE: self.prefix_cache,
            DRAM: self._dram,
            NVME: self._nvme,
        }

    def prepare(self, tokens: Sequence[int]) -> None:
        self._warehouse.clear()
        self._pages = len(tokens) // BLOCK_TOKENS
        self.engine.forget()
        self.engine.ask([Ask(tokens)])
        self._warehouse.wait_durable(self._pages)

    def _dram(self, tokens: Sequence[int]) -> TtftSample:
        self._fill_dram(tokens)
        self.engine.forget()
        return self.timed(tokens, HOST)

    def _nvme(self, tokens: Sequence[int]) -> TtftSample:
        self._warehouse.only_on_nvme()
        self.engine.forget()
        before = self._warehouse.read_bytes()
        sample = self.timed(tokens, DISK)
        if sample.share > 0 and self._warehouse.read_bytes() == before:
            raise ProgramError("the connector says NVMe, but the daemon has read nothing from it")
        return sample

    def _fill_dram(self, tokens: Sequence[int]) -> None:
        """A load from NVMe brings pages back to DRAM. Where it was not worth it, they are computed
        and stored anew."""
        if self._warehouse.held().dram < self._loadable(tokens):
            self.engine.forget()
            self.engine.ask([Ask(tokens)])
        if self._warehouse.held().dram < self._loadable(tokens):
            self.prepare(tokens)

    def _loadable(self, tokens: Sequence[int]) -> int:
        """Blocks that a load may ask for: the last token is always computed."""
        return (len(tokens) - 1) // BLOCK_TOKENS


class PeerContender(EngineContender):
    """files: the folder of its file tier."""

    def __init__(self, engine: VllmEngine, files: Path) -> None:
        super().__init__(engine, PEER_ALONE)
        self._files = files
        self.ways = {
            PEER_RECOMPUTED: self.recomputed,
            PEER_PREFIX_CACHE: self.prefix_cache,
            PEER_MEMORY: self._memory,
            PEER_FILES: self._file,
        }

    def prepare(self, tokens: Sequence[int]) -> None:
        for path in self._blocks():
            path.unlink()
        self.engine.forget(connector=True)
        self.engine.ask([Ask(tokens)])
        blocks = len(tokens) // BLOCK_TOKENS
        if not wait_for(lambda: len(self._blocks()) >= blocks, _FILES_WAIT_S):
            raise ProgramError(f"{len(self._blocks())} of {blocks} files within {_FILES_WAIT_S} s")

    def _memory(self, tokens: Sequence[int]) -> TtftSample:
        """prepare and every read of files leave the blocks in memory."""
        self.engine.forget()
        return self.timed(tokens, HOST)

    def _file(self, tokens: Sequence[int]) -> TtftSample:
        """Its reset empties the memory and keeps the files, as a restart does."""
        self.engine.forget(connector=True)
        for path in self._blocks():
            _leave_page_cache(path)
        return self.timed(tokens, DISK)

    def _blocks(self) -> list[Path]:
        return list(self._files.rglob("*.bin"))


def _leave_page_cache(path: Path) -> None:
    """For file systems without direct I/O; with it nothing is there."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


@contextlib.contextmanager
def offload_region() -> Iterator[str]:
    """An engine id of its own; its region is removed afterwards."""
    engine_id = f"kvw-bench-{os.urandom(6).hex()}"
    try:
        yield engine_id
    finally:
        for path in _SHARED_MEMORY.glob(f"vllm_offload_{engine_id}*"):
            path.unlink(missing_ok=True)
