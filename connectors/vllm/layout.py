"""Where a block's bytes lie in an engine's cache tensors, whatever layout it chose.

vLLM registers, per layer, a tensor whose dimension 0 counts blocks; the others may lie in any
order. A block is the contiguous pieces of its layers, in the order of memory within a layer: their
order is part of the layout's name, because it is part of what the bytes mean.

Immutable; thread-safe. Knows addresses; the tensors are kept alive.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_connectors.common.layout import BlockLayout
from kvwarehouse_connectors.vllm import compat


def block_layout(
    caches: dict[str, Any], layer_names: Sequence[str], num_blocks: int, order: str
) -> BlockLayout:
    """caches: vLLM's registered tensors by layer, in host memory. order: vLLM's own name of the
    layout. Layers that share a tensor count once. Raises UsageError (code "unsupported") where a
    tensor is none of num_blocks blocks."""
    pieces: list[tuple[int, int, int]] = []
    described, tensors, seen = [order], [], set()
    for name in layer_names:
        if name not in caches:
            continue  # shares another layer's cache
        tensor = caches[name]
        if tensor.shape[0] % num_blocks:
            raise kvw.UsageError(
                f"kvwarehouse cannot serve layer {name}: its cache of shape {tuple(tensor.shape)}"
                f" is not made of {num_blocks} blocks",
                code="unsupported",
            )
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        tensors.append(tensor)
        view = compat.by_manager_block(tensor, num_blocks)
        found, text = _pieces(view)
        pieces += found
        described.append(text)
    if not pieces:
        raise kvw.UsageError(
            f"kvwarehouse cannot serve layers {', '.join(layer_names[:2])}, ...: the engine"
            " registered no cache for them",
            code="unsupported",
        )
    bases, strides, sizes = zip(*pieces, strict=True)
    return BlockLayout(
        tuple(tensors),
        np.array(bases, np.uint64),
        np.array(strides, np.int64),
        np.array(sizes, np.uint64),
        hashlib.blake2b("\n".join(described).encode(), digest_size=16).hexdigest(),
    )


def _pieces(view: Any) -> tuple[list[tuple[int, int, int]], str]:
    """(base, stride, bytes) of each contiguous piece of a block, and what describes them."""
    item = view.element_size()
    inner = sorted(
        (
            (stride, size)
            for stride, size in zip(view.stride()[1:], view.shape[1:], strict=True)
            if size > 1
        ),
        reverse=True,
    )
    run = 1
    while inner and inner[-1][0] == run:
        run *= inner.pop()[1]
    block_stride = view.stride(0) * item
    offsets = [
        sum(place * stride for place, (stride, _) in zip(places, inner, strict=True))
        for places in itertools.product(*(range(size) for _, size in inner))
    ]
    pieces = [(view.data_ptr() + offset * item, block_stride, run * item) for offset in offsets]
    # The logical shape and the order of its dimensions in memory; not the distances, which depend
    # on how many blocks there are.
    wide = [d for d in range(1, view.dim()) if view.shape[d] > 1]
    rank = sorted(wide, key=lambda d: -view.stride(d))
    text = f"{view.dtype} {tuple(view.shape[1:])} {rank} {len(pieces)}x{run * item}"
    return pieces, text
