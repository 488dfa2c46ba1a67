"""The namespaces of an engine: everything its blocks depend on besides their tokens.

Stateless. Reads the files of the weights (their headers and samples: seconds for large models), so
not on a thread that anybody waits for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.core.identity import (
    checkpoint_fingerprint,
    digest_of,
    no_weights,
    short_name,
)
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.messages import CacheInfo
from kvwarehouse_connectors.vllm.settings import WHERE

LAYOUT = "vllm/1"
"""Layers of a cache group in vLLM's order, each block as it lies in memory; which order that is
stands in extra["layout"] (layout.py)."""

# What changes no KV. All else of a model's config counts: a field too many costs a miss, a field
# left out could cost a wrong answer.
_INCIDENTAL = ("_name_or_path", "transformers_version", "_commit_hash")


@dataclass(frozen=True)
class Shared:
    """What the namespaces of an engine have in common, beside its configuration."""

    weights: str
    hash_scheme: str
    shards: int
    salt: str


class GivenWeights(Protocol):
    @property
    def weights(self) -> str: ...


def weights_fingerprint(vllm_config: Any, settings: GivenWeights, where: str = WHERE) -> str:
    """Of the weights that this engine loaded, or the name given in their place. where: what
    messages call the place of the settings. Raises UsageError (code "no_weights") where there are
    no files to read."""
    if settings.weights:
        return settings.weights
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        raise no_weights("load_format is dummy: such weights are in no file", where)
    model = str(
        getattr(vllm_config.model_config, "model_weights", "") or vllm_config.model_config.model
    )
    return checkpoint_fingerprint(
        model,
        vllm_config.model_config.revision,
        vllm_config.load_config.download_dir,
        where,
    )


def namespaces(
    vllm_config: Any,
    groups: Sequence[CacheGroup],
    cache_info: CacheInfo,
    shared: Shared,
) -> tuple[kvw.Namespace, ...]:
    """One for each group, in their order."""
    model = vllm_config.model_config
    made = []
    for group, seen in zip(groups, cache_info.groups, strict=True):
        made.append(
            kvw.Namespace(
                model=f"{short_name(model.model)}/{config_digest(model.hf_config)}",
                weights=shared.weights,
                dtype=str(model.dtype).removeprefix("torch."),
                layout=LAYOUT,
                page_tokens=group.block_tokens,
                page_bytes=seen.page_bytes,
                shards=shared.shards,
                kv_dtype=seen.kv_dtype,
                attention_backend=seen.attention_backend,
                cache_group=_group_name(group, groups),
                salt=shared.salt,
                hash_scheme=shared.hash_scheme,
                extra={
                    "device": cache_info.device,
                    "layout": seen.layout,
                    # Some models scale positions or attention by it.
                    "max_model_len": str(model.max_model_len),
                    "overrides": digest_of(model.override_generation_config or {}),
                    "quantization": str(model.quantization or ""),
                    "rule": f"{group.rule.value}/{group.reach_tokens}",
                    "vllm": compat.VERSION,
                },
            )
        )
    return tuple(made)


def _group_name(group: CacheGroup, groups: Sequence[CacheGroup]) -> str:
    """By its layers, so that two groups of equal shape stay apart."""
    if len(groups) == 1:
        return ""
    digest = hashlib.blake2b("\n".join(group.layer_names).encode(), digest_size=8).hexdigest()
    return f"{group.index}/{digest}"


def config_digest(config: Any) -> str:
    return digest_of({n: value for n, value in config.to_dict().items() if n not in _INCIDENTAL})
