"""A model with states beside its KV: SGLang's real HybridCacheController, with a host pool of
multi-head KV and one of states, on the CPU."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kvwarehouse_bench.harness.eventually import DEADLINE_S
from sglang_rig.engine import THRESHOLD, _Device
from sglang_rig.pools import PAGE, Shape, content, device_pool, fill, host_pool, wipe

_STATES = 8


@dataclass(frozen=True)
class Restored:
    """hit: tokens that can be restored. pages, state: what came."""

    hit: int
    pages: list[bytes] = field(repr=False)
    state: bytes = field(repr=False)


def state_pool(layout: str) -> Any:
    """Of 2 layers: a state of 4 x 32 numbers and one of convolutions, 3 x 16."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, _STATES, 4, 32, dtype=torch.float32),
        conv=(torch.zeros(2, _STATES, 3, 16, dtype=torch.bfloat16),),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=_STATES, pin_memory=False, layout=layout)


class HybridEngine:
    """extra: as engine.config makes it. Attached when entered. join_ranks comes first."""

    def __init__(self, layout: str, extra: dict[str, Any]) -> None:
        self._extra = extra
        shape = Shape(layout)
        device = device_pool(shape)
        self.host, self.states = host_pool(shape, device), state_pool(layout)
        group = HostPoolGroup(
            [
                PoolEntry(PoolName.KV, self.host, device, _same, is_primary_index_anchor=True),
                PoolEntry(PoolName.MAMBA, self.states, None, _same),
            ]
        )
        self.controller = HybridCacheController(
            _Device(device),
            group,
            PAGE,
            dist.group.WORLD,
            threading.Event(),
            write_policy="write_through",
            io_backend="direct",
        )
        self._requests = 0

    def store(self, tokens: list[int], seed: int, states: list[int], before: Any) -> Restored:
        """Pages of noise, and states at the ends of the pages `states`. before: None or []: what
        SGLang says of the keys before."""
        keys = get_storage_hash_str(tokens, None, page_size=PAGE)
        slots, held = self.host.alloc(len(tokens)), self.states.alloc(max(1, len(states)))
        fill(self.host, seed)
        self._fill_states(seed)
        pages, state = content(self.host, slots), self._state(held[-1])
        transfers = [self._transfer(held[[n]], [keys[page - 1]]) for n, page in enumerate(states)]
        for transfer in transfers or [None]:
            self.controller.write_storage(
                slots, tokens, keys, before, extra_pools=[transfer] if transfer else None
            )
            self.controller.ack_backup_queue.get(timeout=DEADLINE_S)
        self.host.free(slots)
        self.states.free(held)
        self._wipe()
        return Restored(len(tokens), pages, state)

    def restore(self, tokens: list[int], before: Any) -> Restored:
        self._requests += 1
        held = self.states.alloc(1)
        keys = get_storage_hash_str(tokens, None, page_size=PAGE)
        self.controller.prefetch(
            CacheRequestHandle(f"request-{self._requests}", 0),
            tokens,
            None,
            before,
            extra_pools=[self._transfer(held, keys[-1:])],
        )
        operation = self.controller.prefetch_hit_queue.get(timeout=DEADLINE_S)
        pages, state = [], b""
        if operation.storage_hit_count:
            slots = self.host.alloc(operation.storage_hit_count)
            operation.host_indices = slots
            self.controller.prefetch_buffer.put(operation)
            tokens_come, with_state = self._acknowledged()
            pages = content(self.host, slots[:tokens_come]) if tokens_come else []
            state = self._state(held[0]) if with_state else b""
            self.host.free(slots)
        self.states.free(held)
        self._wipe()
        return Restored(operation.storage_hit_count, pages, state)

    def _acknowledged(self) -> tuple[int, bool]:
        tokens, state = 0, False
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=DEADLINE_S)
            if ack.completed_tokens is not None:
                tokens = int(ack.completed_tokens)
            if ack.pool_hits:
                state = ack.pool_hits.get(PoolName.MAMBA) == 1
            if ack.completed_req:
                return tokens, state

    def _transfer(self, slots: torch.Tensor, keys: list[str]) -> PoolTransfer:
        return PoolTransfer(
            PoolName.MAMBA, slots, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES
        )

    def _state(self, slot: torch.Tensor) -> bytes:
        page = self.states.get_data_page(int(slot))
        return bytes(page.contiguous().view(torch.uint8).numpy().tobytes())

    def _fill_states(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed % (1 << 62))
        for tensor in self.states.get_hybrid_pool_buffer():
            flat = tensor.view(-1).view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, generator=generator, dtype=torch.uint8))

    def _wipe(self) -> None:
        wipe(self.host)
        for tensor in self.states.get_hybrid_pool_buffer():
            tensor.zero_()

    def __enter__(self) -> Self:
        self.controller.attach_storage_backend(
            "dynamic",
            prefetch_threshold=THRESHOLD,
            model_name="tiny",
            storage_backend_extra_config=dict(self._extra),
            host_pools=self.controller.mem_pool_host.entries,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.controller.detach_storage_backend()


def _same(layer: int) -> int:
    return layer
