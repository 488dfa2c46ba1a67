"""vLLM's tiering on its CPU platform, for which it has no worker: manager, tiers, connector and
rows are vLLM's own, and blocks are copied by the host, at once, where vLLM has streams of a GPU.

    "spec_name": "HostTieringSpec", "spec_module_path": "vllm_rig.host_offloading"
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _HostWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class _HostWorker(OffloadingWorker):
    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._groups = kv_caches.group_data_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._blocks = [tensor.tensor for tensor in kv_caches.tensors]
        self._chunks = [
            region.create_next_worker_view(tensor.page_size_bytes * blocks_per_chunk)
            for tensor in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, place in self._pieces(src_spec, dst_spec):
            place.copy_(block)
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, place in self._pieces(dst_spec, src_spec):
            block.copy_(place)
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        return None

    def shutdown(self) -> None:
        self._chunks.clear()
        self._region.cleanup()

    def _pieces(self, blocks: Any, chunks: Any) -> Iterator[tuple[Any, Any]]:
        """Of each block and layer: its bytes in the cache, and their place in a chunk."""
        each = self._blocks_per_chunk
        block_ids, chunk_ids = iter(blocks.block_ids), iter(chunks.block_ids)
        for refs, size, first in zip(
            self._groups, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            chunk = -1
            for number in range(first, first + size):
                if number == first or number % each == 0:
                    chunk = int(next(chunk_ids))
                block = int(next(block_ids))
                for ref in refs:
                    source = self._blocks[ref.tensor_idx]
                    begin = number % each * source.shape[1]
                    row = self._chunks[ref.tensor_idx][chunk]
                    yield (
                        source[block][: ref.page_size_bytes],
                        row[begin : begin + ref.page_size_bytes],
                    )
