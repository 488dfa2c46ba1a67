"""vLLM's KV cache as this connector serves it: its groups, and where a block's bytes lie in its
tensors, whatever layout the engine chose.

vLLM registers, per layer, a tensor whose dimension 0 counts blocks; the others may lie in any
order. A block is the contiguous pieces of its layers, in the order of memory within a layer: their
order is part of the layout's name, because it is part of what the bytes mean.

Stateless. Knows addresses; the tensors are kept alive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.core.layout import BlockLayout, pieces_of
from kvwarehouse_connectors.vllm import compat


def cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """The groups of a model, full attention first. Raises UsageError (code "unsupported") naming
    what cannot be served."""
    hash_tokens = kv_cache_config.hash_block_size
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        problem = compat.group_problem(group)
        if problem:
            raise unsupported(
                f"cache group {index} ({', '.join(group.layer_names[:2])}, ...)", problem
            )
        if not group.layer_names:
            raise unsupported(
                "this engine", f"has a pipeline stage without layers of group {index}"
            )
        spec = compat.group_spec(group)
        rule, reach = _rule(spec)
        block_tokens = int(spec.block_size)
        each = int(hash_tokens or block_tokens)
        if block_tokens % each:
            raise unsupported(
                f"cache group {index}", f"has blocks of {block_tokens} tokens and hashes of {each}"
            )
        groups.append(CacheGroup(index, rule, block_tokens, reach, each, tuple(group.layer_names)))
    if not groups:
        raise unsupported("this model", "has no KV cache")
    return tuple(sorted(groups, key=lambda group: not group.chained))


def _rule(spec: Any) -> tuple[Rule, int]:
    kind = compat.spec_kind(spec)
    if kind == "sliding_window":
        return Rule.WINDOW, int(spec.sliding_window)
    if kind == "chunked_local":
        return Rule.CHUNK, int(spec.attention_chunk_size)
    if kind == "mamba":
        return Rule.STATE, 0
    return Rule.PREFIX, 0


def unsupported(what: str, problem: str) -> kvw.UsageError:
    return kvw.UsageError(
        f"kvwarehouse cannot serve {what}: it {problem}. Start the engine without the connector, "
        "or see docs/vllm.md for what is served",
        code="unsupported",
    )


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
