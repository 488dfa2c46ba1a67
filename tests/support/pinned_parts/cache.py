"""Paged caches of engines on the device of the contract model, in the layouts that engines have."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvwarehouse_connectors.core.layout import BlockLayout, pieces_of
from testkit.cuda_model import ModelDevice
from testkit.cuda_tensors import ModelMemory, ModelTensor, contiguous

BLOCKS = 9
LAYERS = 3
ITEM_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}

# By name: a view's shape, and the order of its dimensions in memory, outermost first.
# B: blocks, N: tokens, H: heads, C: keys beside values, D: the size of a head.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    # [B, N, H, C*D] in this order: tokens outside
    "NHD": ((BLOCKS, 16, 4, 40), (0, 1, 2, 3)),
    # the same view, heads outside
    "HND": ((BLOCKS, 16, 4, 40), (0, 2, 1, 3)),
    # keys and values apart, outside of the blocks: two pieces a block
    "keys then values": ((BLOCKS, 2, 16, 4, 24), (1, 0, 2, 3, 4)),
    # heads outside of the blocks: a piece a head
    "heads outside": ((BLOCKS, 4, 16, 40), (1, 0, 2, 3)),
    # one latent a token, of no round size
    "MLA": ((BLOCKS, 16, 1, 57), (0, 1, 2, 3)),
    # one tensor of all layers: blocks outside, a layer's part of a block inside
    "cross-layer": ((BLOCKS, 16, 4, 40), (0, 1, 2, 3)),
    # pieces of 128 KiB and more go by the copy engines, each for itself
    "large": ((BLOCKS, 16, 8, 1024), (0, 1, 2, 3)),
}


@dataclass
class Cache:
    """Layers on the model's device. `pages`: what each block holds, layer by layer in the order of
    memory, read off by the shapes and not by the connector's code."""

    memories: list[ModelMemory]
    views: list[ModelTensor]
    order: tuple[int, ...]
    layout: BlockLayout

    def pages(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        parts = []
        if len(self.memories) < len(self.views):
            return self.memories[0].data.reshape(BLOCKS, -1)
        for memory, view in zip(self.memories, self.views, strict=True):
            shape = [view.shape[d] for d in self.order]
            whole = memory.data.reshape(*shape, view.element_size())
            whole = np.moveaxis(whole, self.order.index(0), 0)
            parts.append(whole.reshape(BLOCKS, -1))
        return np.concatenate(parts, axis=1)


def cache_of(device: ModelDevice, name: str, dtype: str, rng: random.Random) -> Cache:
    shape, order = LAYOUTS[name]
    item = ITEM_BYTES[dtype]
    if name == "cross-layer":
        whole = (BLOCKS, LAYERS, *shape[1:])
        memory = ModelMemory(device, int(np.prod(whole)) * item)
        memory.fill(np.frombuffer(rng.randbytes(memory.size_bytes), np.uint8))
        strides, inside = contiguous(whole), int(np.prod(shape[1:]))
        views = [
            ModelTensor(memory, shape, (strides[0], *strides[2:]), item, dtype, layer * inside)
            for layer in range(LAYERS)
        ]
        return Cache([memory], views, order, layout_of(views))
    places, step = [0] * len(shape), 1
    for dimension in reversed(order):
        places[dimension] = step
        step *= shape[dimension]
    memories = [ModelMemory(device, step * item) for _ in range(LAYERS)]
    for memory in memories:
        memory.fill(np.frombuffer(rng.randbytes(memory.size_bytes), np.uint8))
    views = [ModelTensor(memory, shape, places, item, dtype) for memory in memories]
    return Cache(memories, views, order, layout_of(views))


def layout_of(views: list[ModelTensor]) -> BlockLayout:
    pieces = [piece for view in views for piece in pieces_of(view)[0]]
    bases, strides, sizes = zip(*pieces, strict=True)
    return BlockLayout(
        tuple(views),
        np.array(bases, np.uint64),
        np.array(strides, np.int64),
        np.array(sizes, np.uint64),
        "test",
    )
