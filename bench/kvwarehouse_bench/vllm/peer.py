"""vLLM's own tiered offloading, on a CPU: it ships copies between a device and memory for GPUs
only, so the bench brings the copies. All else (keys, tiers, files, scheduling) is vLLM's.

Imported in the engine's processes, by name (engine.py). Copies are single memmoves of a layer's
part of a block, the least that such a copy can cost.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    _worker: Any

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _HostWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class _HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies when it is told to, in the engine's thread."""

    def __init__(self, caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._groups = caches.group_data_refs
        self._cache = [tensor.tensor for tensor in caches.tensors]
        self._pages = [tensor.page_size_bytes for tensor in caches.tensors]
        self._host = [
            region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return None

    def shutdown(self) -> None:
        self._host = []
        self._region.cleanup()

    def _copy(self, job_id: int, cache: Any, host: Any, *, store: bool) -> bool:
        begin = time.perf_counter()
        moved = 0
        cache_ids, host_ids = cache.block_ids.tolist(), host.block_ids.tolist()
        at = at_host = 0
        for group, (size, first) in enumerate(
            zip(cache.group_sizes, cache.block_indices, strict=True)
        ):
            skip = first % self._per_chunk
            chunks = -(-(size + skip) // self._per_chunk)
            places = [divmod(skip + offset, self._per_chunk) for offset in range(size)]
            pairs = [
                (cache_ids[at + offset], host_ids[at_host + chunk], part)
                for offset, (chunk, part) in enumerate(places)
            ]
            moved += self._copy_group(group, pairs, store=store)
            at, at_host = at + size, at_host + (chunks if size else 0)
        seconds = time.perf_counter() - begin
        self._done.append(
            TransferResult(job_id=job_id, success=True, transfer_size=moved, transfer_time=seconds)
        )
        return True

    def _copy_group(self, group: int, pairs: list[tuple[int, int, int]], *, store: bool) -> int:
        """pairs: of (block in the cache, chunk in memory, part of that chunk)."""
        moved = 0
        for ref in self._groups[group]:
            tensor, view = self._cache[ref.tensor_idx], self._host[ref.tensor_idx]
            page = self._pages[ref.tensor_idx]
            base, stride = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
            host_base, host_stride = view.data_ptr(), view.stride(0)
            for block, chunk, part in pairs:
                mine = base + block * stride
                theirs = host_base + chunk * host_stride + part * page
                ctypes.memmove(theirs, mine, page) if store else ctypes.memmove(mine, theirs, page)
            moved += page * len(pairs)
        return moved
