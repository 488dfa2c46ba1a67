"""What of an engine's cache is stored by itself: a layer group, and of it what differs from rank to
rank apart from what every rank has alike.

KVCacheManager (V1) registers one pool tensor, [blocks, layers, keys and values, rest]: one part.
KVCacheManagerV2 registers a layout: per layer group, byte ranges that repeat with each page slot.

Immutable; stateless. Each refusal says what was found and what is served.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.core.layout import BlockLayout
from kvwarehouse_connectors.core.memory import BlockMemory, HostMemory
from kvwarehouse_connectors.trtllm import compat

ABSENT = -1
"""TensorRT-LLM's BAD_PAGE_INDEX: a block that has no page in a group; it stays in its place."""

_KEYS_AND_VALUES = (1, 2)  # latent attention keeps one tensor, others two


@dataclass(frozen=True)
class Part:
    """group: index is the layer group, whose block table it goes by; reach_tokens a window's, else
    0."""

    group: CacheGroup
    memory: BlockMemory
    slots: int
    replicated: bool
    device: str

    @property
    def page_bytes(self) -> int:
        return self.memory.block_bytes


@dataclass(frozen=True)
class Cache:
    """pool: whether it is one tensor."""

    parts: tuple[Part, ...]
    block_tokens: int
    pool: bool

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return tuple(part.group for part in self.parts)


def pool_cache(tensor: Any, block_tokens: int) -> Cache:
    """Of the tensor that register_kv_caches brings. Raises UsageError (code "unsupported")."""
    shape = tuple(int(size) for size in tensor.shape)
    if len(shape) < 4 or shape[2] not in _KEYS_AND_VALUES or 0 in shape:
        raise compat.unsupported(
            "this KV cache",
            f"is a pool tensor of shape {shape} (served: [blocks, layers, 1 or 2, heads x"
            " tokens_per_block x head size])",
        )
    block_items = int(np.prod(shape[1:]))
    if tuple(tensor.stride()) != _contiguous(shape):
        raise compat.unsupported(
            "this KV cache", f"is a pool tensor with strides {tuple(tensor.stride())} (contiguous)"
        )
    if block_items // (shape[1] * shape[2]) % block_tokens:
        raise compat.unsupported(
            "this KV cache",
            f"has {shape} items and kv_cache_config.tokens_per_block = {block_tokens}, which does"
            " not divide them",
        )
    block_bytes = block_items * int(tensor.element_size())
    text = f"pool {tensor.dtype} {shape[1:]}"
    group = _group(0, None, block_tokens, text)
    memory = _memory([tensor], [int(tensor.data_ptr())], [block_bytes], [block_bytes], text)
    part = Part(group, memory, shape[0], False, compat.device_name(tensor))
    return Cache((part,), block_tokens, pool=True)


def layout_cache(layout: Any) -> Cache:
    """Of the KvCacheLayout that register_kv_cache_layout brings. Raises UsageError (code
    "unsupported")."""
    block_tokens = int(layout.tokens_per_block)
    parts = []
    numbers = [int(group.layer_group_id) for group in layout.groups]
    if len(set(numbers)) != len(numbers) or min(numbers, default=0) < 0:
        raise compat.unsupported(
            "this KV cache", f"numbers its layer groups {numbers} (served: each once, from 0)"
        )
    for group in layout.groups:
        for regions, replicated in ((group.regions, False), (group.replicated_regions, True)):
            if regions:
                parts.append(_part(group, regions, block_tokens, replicated=replicated))
    if not parts:
        raise compat.unsupported("this KV cache", "has no layer group with bytes in it")
    return Cache(tuple(parts), block_tokens, pool=False)


def _part(group: Any, regions: Sequence[Any], block_tokens: int, *, replicated: bool) -> Part:
    index = int(group.layer_group_id)
    slots = {int(region.num_slots) for region in regions}
    if len(slots) != 1 or min(slots) < 1:
        raise compat.unsupported(
            f"layer group {index}", f"has regions of {sorted(slots)} slots (served: equally many)"
        )
    for region in regions:
        if not 0 < int(region.size) <= int(region.stride):
            raise compat.unsupported(
                f"layer group {index}",
                f"has a region of {region.size} bytes every {region.stride} (served: apart)",
            )
    window = None if group.window_size is None else int(group.window_size)
    if window is not None and window < 1:
        raise compat.unsupported(f"layer group {index}", f"has a window of {window} tokens")
    text = "\n".join(
        [f"layout {'replicated' if replicated else 'sharded'} window={window}"]
        + [
            f"{int(r.size)}: {[(b.layer_id, b.role, b.expansion) for b in r.buffers]}"
            for r in regions
        ]
    )
    tensors = [region.as_tensor() for region in regions]
    memory = _memory(
        tensors,
        [int(region.base) for region in regions],
        [int(region.stride) for region in regions],
        [int(region.size) for region in regions],
        text,
    )
    device = compat.device_name(tensors[0])
    return Part(_group(index, window, block_tokens, text), memory, slots.pop(), replicated, device)


def _group(index: int, window: int | None, block_tokens: int, text: str) -> CacheGroup:
    """A window is found as full attention is, from the first block on: TensorRT-LLM may take any
    part of an offer, and whatever it takes, the window at its end has to be there. What is loaded
    of it is what the engine gave slots for."""
    return CacheGroup(index, Rule.PREFIX, block_tokens, window or 0, block_tokens, (text,))


def _memory(
    tensors: list[Any], bases: list[int], strides: list[int], sizes: list[int], text: str
) -> BlockMemory:
    if all(tensor.device.type == "cpu" for tensor in tensors):
        name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return HostMemory(
            BlockLayout(
                tuple(tensors),
                np.array(bases, np.uint64),
                np.array(strides, np.int64),
                np.array(sizes, np.uint64),
                name,
            )
        )
    from kvwarehouse_connectors.core.device_memory import DeviceMemory

    return DeviceMemory(tensors)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
