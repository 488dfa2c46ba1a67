"""Cache groups as vLLM has them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

_HEADS = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}


def full(block_tokens: int, *, heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_tokens, **{**_HEADS, "num_kv_heads": heads})


def window(block_tokens: int, reach_tokens: int, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_tokens, sliding_window=reach_tokens, **_HEADS, **more)


def chunk(block_tokens: int, reach_tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_tokens, attention_chunk_size=reach_tokens, **_HEADS
    )


def state(block_tokens: int, mode: str = "align") -> MambaSpec:
    return MambaSpec(
        block_size=block_tokens,
        shapes=((2, 8),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
    )


def group(spec: KVCacheSpec, *layers: str, **more: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(list(layers) or ["layer"], spec, **more)


def config(
    *groups: KVCacheSpec | KVCacheGroupSpec, hash_tokens: int | None = None, blocks: int = 64
) -> KVCacheConfig:
    """One group for each spec, with a layer of its own."""
    found = [
        one if isinstance(one, KVCacheGroupSpec) else group(one, f"layer.{place}")
        for place, one in enumerate(groups)
    ]
    return KVCacheConfig(blocks, [], found, hash_block_size=hash_tokens)
