"""Where a block's bytes lie in an engine's cache tensors, whatever layout it chose.

vLLM registers, per layer, a tensor whose dimension 0 counts blocks; the others may lie in any
order. A block is the contiguous pieces of its layers, in the order of memory within a layer: their
order is part of the layout's name, because it is part of what the bytes mean.

Immutable; thread-safe. Knows addresses; the tensors are kept alive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_connectors.core.layout import BlockLayout, pieces_of
from kvwarehouse_connectors.vllm import compat


def block_layout(
    caches: dict[str, Any], layer_names: Sequence[str], num_blocks: int, order: str
) -> BlockLayout:
    """caches: vLLM's registered tensors by layer. order: vLLM's own name of the
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
        found, text = pieces_of(view)
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
