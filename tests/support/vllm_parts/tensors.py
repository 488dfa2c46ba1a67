"""Cache tensors as vLLM makes them, in each of its layouts, and their bytes without the connector.

vLLM's own functions lay them out; only the size of the memory is ours."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvwarehouse_connectors.core.device_memory import DeviceMemory
from kvwarehouse_connectors.core.layout import BlockLayout
from kvwarehouse_connectors.core.memory import HostMemory
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.cache_layout import block_layout
from vllm_parts.specs import full, group, window

try:  # vLLM 0.33
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Caches:
    config: KVCacheConfig
    by_layer: dict[str, torch.Tensor]
    order: str

    @property
    def blocks(self) -> int:
        return self.config.num_blocks

    @property
    def memory(self) -> Bytes:
        """All bytes of the backing memory, shared with it."""
        return storage(next(iter(self.by_layer.values())))

    def layout(self, group: int = 0) -> BlockLayout:
        names = self.config.kv_cache_groups[group].layer_names
        return block_layout(self.by_layer, names, self.blocks, self.order)

    def views(self, group: int = 0) -> list[torch.Tensor]:
        tensors = self.layout(group).tensors
        return [compat.by_manager_block(tensor, self.blocks) for tensor in tensors]

    def host(self, group: int = 0) -> HostMemory:
        return HostMemory(self.layout(group))

    def device(self, group: int = 0) -> DeviceMemory:
        return DeviceMemory(self.views(group))

    def page(self, block: int, group: int = 0) -> Bytes:
        """The bytes of a block, layer by layer, each in the order of its addresses."""
        parts = []
        for name in self.config.kv_cache_groups[group].layer_names:
            tensor = self.by_layer[name]
            found = addresses(compat.by_manager_block(tensor, self.blocks)[block])
            parts.append(storage(tensor)[found - tensor.untyped_storage().data_ptr()])
        return np.concatenate(parts)


def caches(
    groups: Sequence[KVCacheGroupSpec],
    layout: KVCacheLayout,
    blocks: int,
    kernel_tokens: int | None = None,
) -> Caches:
    """Filled with noise. kernel_tokens: block size of the kernels, less than the scheduler's."""
    config = _config(groups, layout, blocks)
    sizes = [kernel_tokens] * len(groups) if kernel_tokens else None
    by_layer = allocate_kv_cache(config, torch.device("cpu"), layout, sizes)
    made = Caches(config, by_layer, layout.name)
    noise = torch.randint(0, 256, (made.memory.size,), dtype=torch.uint8)
    made.memory[:] = noise.numpy()
    return made


def _config(
    groups: Sequence[KVCacheGroupSpec], layout: KVCacheLayout, blocks: int
) -> KVCacheConfig:
    engine = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=blocks,
            prefix_cache_retention_interval=None,
        ),
    )
    return get_kv_cache_config_from_groups(engine, list(groups), 1 << 40)


def storage(tensor: torch.Tensor) -> Bytes:
    whole = torch.empty(0, dtype=torch.uint8)
    whole.set_(tensor.untyped_storage())
    return whole.numpy()


def addresses(block: torch.Tensor) -> NDArray[np.int64]:
    """Of each byte of a tensor, rising."""
    item = block.element_size()
    places = itertools.product(*(range(size) for size in block.shape))
    offsets = np.array([np.dot(place, block.stride()) for place in places], np.int64) * item
    every = block.data_ptr() + (offsets[:, None] + np.arange(item)).reshape(-1)
    return np.sort(every)


def noise(rows: int, row_bytes: int) -> Bytes:
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8).numpy()


def shapes() -> dict[str, Any]:
    """Groups that a model may have, by name."""
    wide = full(16)
    narrow = type(wide)(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    latent = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16, cache_dtype_str=None
    )
    padded = MambaSpec(
        block_size=16,
        shapes=((3, 5), (7,)),
        dtypes=(torch.float32, torch.float16),
        page_size_padded=wide.page_size_bytes,
        mamba_cache_mode="align",
    )
    index = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8)

    def together(a: KVCacheSpec, b: KVCacheSpec) -> list[KVCacheGroupSpec]:
        both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": a, "b": b})
        return [group(both, "a", "b")]

    return {
        "one layer": [group(wide, "a")],
        "three layers": [group(wide, "a", "b", "c")],
        "latent attention": [group(latent, "a", "b")],
        "layers of two sizes": together(wide, narrow),
        "latent attention and its index": together(latent, index),
        "full attention and its index": together(wide, index),
        "a window beside it": [group(wide, "a", "b"), group(window(16, 64), "c", "d")],
        "padded states beside it": [group(wide, "a", "b"), group(padded, "c", "d")],
    }


def laid_out() -> list[tuple[str, KVCacheLayout]]:
    """The shapes and layouts that vLLM puts together; others it refuses to start with."""
    found = []
    for shape, layout in itertools.product(shapes(), KVCacheLayout):
        try:
            caches(shapes()[shape], layout, 2)
        except (AssertionError, ValueError):
            continue
        found.append((shape, layout))
    return found
