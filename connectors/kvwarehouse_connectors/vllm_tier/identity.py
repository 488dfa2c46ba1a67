"""The namespaces of a tier: everything a chunk depends on that vLLM's key of it does not say.

Stateless. Reads the files of the weights (their headers and samples: seconds for large models), so
not on a thread that anybody waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.identity import digest_of, short_name
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.cache_layout import unsupported
from kvwarehouse_connectors.vllm.identity import (
    config_digest,
    draft_weights,
    weights_fingerprint,
)
from kvwarehouse_connectors.vllm.kv_options import options_digest
from kvwarehouse_connectors.vllm_tier.chunks import RowGroup
from kvwarehouse_connectors.vllm_tier.rank_rows import GroupRows, RankRows, joined
from kvwarehouse_connectors.vllm_tier.settings import WHERE, TierSettings

LAYOUT = "vllm-tier/1"
"""A chunk's pieces as they lie in its row of vLLM's CPU tier, in the order of their offsets."""
# A namespace has at most so many; figures in tokens are wrong for larger chunks, and nothing else.
_MOST_PAGE_TOKENS = 4096


def all_weights(vllm_config: Any, settings: TierSettings) -> str:
    """A fingerprint of the weights that this engine computes KV with, its model's and its draft
    model's, or the name given in their place. Raises UsageError (code "no_weights") where there are
    no files to read."""
    target = weights_fingerprint(vllm_config, settings, WHERE)
    if settings.weights or compat.draft_model(vllm_config) is None:
        return target
    return digest_of([target, draft_weights(vllm_config, settings, target, WHERE)])


def row_groups(
    vllm_config: Any, offloading: Any, ranks: Sequence[RankRows], weights: str, salt: str
) -> dict[int, RowGroup]:
    """By the group's number in vLLM's keys. offloading: vLLM's OffloadingConfig. ranks: what all
    workers said. Raises UsageError (code "unsupported") where one said nothing."""
    if len({rank.rank for rank in ranks}) != offloading.parallel.world_size:
        raise unsupported(
            "this engine",
            f"has {offloading.parallel.world_size} ranks, of which {len(ranks)} said"
            " how their KV lies",
        )
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    made = {}
    for place, group in enumerate(offloading.groups):
        pieces = [rank.groups[place] for rank in ranks]
        extents = joined(piece for rows in pieces for piece in rows.extents)
        tokens = group.tokens_per_block * offloading.cache.blocks_per_chunk
        made[int(group.group_id)] = RowGroup(
            kvw.Namespace(
                model=f"{short_name(offloading.model.name)}/{_config(vllm_config)}",
                weights=weights,
                dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
                layout=LAYOUT,
                page_tokens=min(tokens, _MOST_PAGE_TOKENS),
                page_bytes=sum(size for _, size in extents),
                kv_dtype="+".join(sorted({rows.kv_dtype for rows in pieces})),
                attention_backend="+".join(sorted({rows.attention_backend for rows in pieces})),
                cache_group=str(group.group_id) if len(offloading.groups) > 1 else "",
                salt=salt,
                hash_scheme=compat.hash_scheme(vllm_config),
                extra={
                    "device": "+".join(sorted({rank.device for rank in ranks})),
                    "chunk": f"{tokens}/{offloading.cache.tokens_per_hash}",
                    "rows": _layout_of(offloading, ranks, pieces),
                    **_beside_the_config(vllm_config),
                },
            ),
            extents,
        )
    return made


def _layout_of(offloading: Any, ranks: Sequence[RankRows], pieces: Sequence[GroupRows]) -> str:
    """Where canonical bytes are the same for other numbers of ranks, so is this. vLLM says of other
    layouts, too, that they do not depend on it, but means the ranks' parts one by one: a row, which
    has them side by side, does."""
    parallel = offloading.parallel
    orders = sorted({rank.order for rank in ranks})
    if offloading.canonical_layout and parallel.is_parallelism_agnostic:
        return digest_of(["canonical", orders, sorted({rows.layout for rows in pieces})])
    sizes = [getattr(parallel, f"{name}_size") for name in ("world", "tp", "pp", "pcp", "dcp")]
    kinds = [offloading.canonical_layout, offloading.replicated_layout]
    return digest_of([sizes, kinds, orders, [rows.layout for rows in pieces]])


def _config(vllm_config: Any) -> str:
    return config_digest(vllm_config.model_config.hf_config)


def _beside_the_config(vllm_config: Any) -> dict[str, str]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    draft = compat.draft_model(vllm_config)
    options = options_digest(vllm_config)
    return {
        # Some models scale positions or attention by it.
        "max_model_len": str(model.max_model_len),
        "overrides": digest_of(model.override_generation_config or {}),
        "quantization": str(model.quantization or ""),
        "draft": ""
        if draft is None
        else f"{vllm_config.speculative_config.method}/{config_digest(draft.hf_config)}",
        "interleave": str(getattr(parallel, "cp_kv_cache_interleave_size", "")),
        "vllm": compat.VERSION,
        **({"options": options} if options else {}),
    }
