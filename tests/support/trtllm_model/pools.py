"""The memory of a KV cache, as its managers register it: one pool tensor (V1), or a layout of byte
ranges in slots (V2). Blocks are addressed as the engine's own kernels would, not by the connector's
arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from trtllm_model.attention import Bytes, Prefixes, kv_of

LAYERS, HEADS, HEAD_BYTES = 3, 2, 32


class HostTensor:
    """As much of a torch.Tensor as a connector asks of one in host memory."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = f"torch.{array.dtype}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


@dataclass(frozen=True)
class Region:  # [layout] KvCacheRegion
    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[Any, ...]
    memory: np.ndarray
    offset: int

    def as_tensor(self) -> HostTensor:
        rows = self.memory[:, self.offset : self.offset + self.size]
        return HostTensor(rows)


@dataclass(frozen=True)
class LayerGroup:  # [layout] KvCacheLayerGroupLayout
    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[Region, ...]
    replicated_regions: tuple[Region, ...]


class Pool:
    """One layer group's blocks. views: (array (slots, ..., tokens, bytes), owner): owner -1 for
    bytes that every rank has alike."""

    def __init__(self, views: Sequence[tuple[np.ndarray, int]], window: int | None) -> None:
        self.views = views
        self.window = window
        self.slots = len(views[0][0])
        self.free = list(range(self.slots))

    def write(self, slot: int, place: int, digest: bytes) -> None:
        """KV of the token at `place` of a block."""
        for view, kv in self._of(slot, place, digest):
            view[...] = kv.reshape(view.shape)

    def right(self, slot: int, place: int, digest: bytes) -> bool:
        return all(
            np.array_equal(view, kv.reshape(view.shape))
            for view, kv in self._of(slot, place, digest)
        )

    def scribble(self, slot: int) -> None:
        """What a block holds when it is handed out: anything."""
        for view, _ in self.views:
            view[slot] = 0xA5

    def _of(self, slot: int, place: int, digest: bytes) -> Iterator[tuple[Bytes, Bytes]]:
        for view, owner in self.views:
            token = view[slot][..., place, :]
            yield token, kv_of(digest, owner, token.size)


class PoolTensor:
    """V1: [blocks, layers, keys and values, heads x tokens x head size], heads first in a block."""

    def __init__(self, rank: int, blocks: int, block_tokens: int) -> None:
        shape = (blocks, LAYERS, 2, HEADS, block_tokens, HEAD_BYTES)
        array = np.zeros(shape, np.uint8)
        self.tensor = HostTensor(array.reshape(blocks, LAYERS, 2, -1))
        self.pools = [Pool([(array, rank * 8)], None)]

    def register(self, worker: Any) -> None:
        worker.register_kv_caches(self.tensor)


class PoolLayout:
    """V2: a group with full attention, whose slots also hold bytes that every rank has alike, and
    one with a window for each of `windows`. Group ids count pools; each has slots of its own."""

    def __init__(self, rank: int, blocks: int, block_tokens: int, windows: Sequence[int]) -> None:
        self.block_tokens = block_tokens
        self.pools: list[Pool] = []
        self.groups: list[LayerGroup] = []
        for number, window in enumerate((None, *windows)):
            own = 2 * HEADS * block_tokens * HEAD_BYTES
            alike = block_tokens * HEAD_BYTES if window is None else 0
            # Half of what is the rank's own, then what is alike, then the other half.
            memory = np.zeros((blocks - number, own + alike + 64), np.uint8)
            shape = (len(memory), HEADS, block_tokens, HEAD_BYTES)
            keys = memory[:, : own // 2].reshape(shape)
            values = memory[:, own // 2 + alike : own + alike].reshape(shape)
            views = [(keys, rank * 8 + 2 * number), (values, rank * 8 + 2 * number + 1)]
            ranges = [(0, own // 2, "key"), (own // 2 + alike, own // 2, "value")]
            shared = []
            if alike:
                index = memory[:, own // 2 : own // 2 + alike]
                views.append((index.reshape(len(memory), block_tokens, HEAD_BYTES), -1))
                shared = [(own // 2, alike, "index_key")]
            assert all(np.shares_memory(memory, view) for view, _ in views)
            self.pools.append(Pool(views, window))
            self.groups.append(
                LayerGroup(
                    number,
                    (number,),
                    window,
                    tuple(_region(memory, number, *one) for one in ranges),
                    tuple(_region(memory, number, *one) for one in shared),
                )
            )

    def register(self, worker: Any) -> None:
        worker.register_kv_cache_layout(
            SimpleNamespace(
                tokens_per_block=self.block_tokens,
                groups=tuple(self.groups),
                gpu_pool_mapping_bytes=None,
            )
        )


def _region(memory: np.ndarray, layer: int, offset: int, size: int, role: str) -> Region:
    return Region(
        base=int(memory.ctypes.data) + offset,
        size=size,
        stride=memory.shape[1],
        num_slots=len(memory),
        buffers=(SimpleNamespace(layer_id=layer, role=role, expansion=1),),
        memory=memory,
        offset=offset,
    )


def page_of(tokens: Sequence[int], block: int, rank: int, block_tokens: int) -> Bytes:
    """The bytes of a block of a pool tensor, as a rank computes them."""
    memory = PoolTensor(rank, 1, block_tokens)
    prefixes = Prefixes()
    for place in range(block_tokens):
        memory.pools[0].write(0, place, prefixes.digest(tokens, block * block_tokens + place))
    return memory.tensor.array[0].reshape(-1)
