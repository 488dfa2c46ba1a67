"""The namespaces of an engine: everything its blocks depend on besides their tokens.

Stateless. Reads the files of the weights (their headers and samples: seconds for large models), so
not on a thread that anybody waits for.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.core.identity import (
    digest_of,
    local_checkpoint,
    no_weights,
    short_name,
)
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.kv_options import options_digest
from kvwarehouse_connectors.vllm.loaded_files import changed_file
from kvwarehouse_connectors.vllm.messages import CacheInfo
from kvwarehouse_connectors.vllm.settings import WHERE

_log = logging.getLogger(__name__)

LAYOUT = "vllm/1"
"""Layers of a cache group in vLLM's order, each block as it lies in memory; which order that is
stands in extra["layout"] (layout.py)."""

# What changes no KV. All else of a model's config counts: a field too many costs a miss, a field
# left out could cost a wrong answer.
_INCIDENTAL = ("_name_or_path", "transformers_version", "_commit_hash")
# vLLM's loaders that read the files of the model's path. Others bring weights from where they like.
READ_THE_FILES = (
    "auto",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
)


@dataclass(frozen=True)
class Shared:
    """What the namespaces of an engine have in common, beside its configuration."""

    weights: str
    hash_scheme: str
    shards: int
    salt: str
    draft: str = ""
    stages: str = ""
    """Which layers each pipeline stage has; "" for one stage."""


class GivenWeights(Protocol):
    @property
    def weights(self) -> str: ...


def check_weights_named(vllm_config: Any, settings: GivenWeights) -> None:
    """Reads no file. Raises UsageError (code "no_weights") where there can be none to read, and no
    name is given in their place."""
    if not settings.weights:
        _check_files(vllm_config.load_config, WHERE)


def weights_fingerprint(vllm_config: Any, settings: GivenWeights, where: str = WHERE) -> str:
    """Of the weights that this engine loaded, or the name given in their place. Where the files may
    have changed since, it is one that no other engine has, and the log says so. where: what
    messages call the place of the settings. Raises UsageError (code "no_weights") where there are
    no files to read."""
    if settings.weights:
        return settings.weights
    return _fingerprint(vllm_config.model_config, vllm_config.load_config, where)


def _check_files(load_config: Any, where: str) -> None:
    load_format = str(load_config.load_format)
    if load_format == "dummy":
        raise no_weights("load_format is dummy: such weights are in no file", where)
    if load_format not in READ_THE_FILES:
        raise no_weights(
            f"load_format is {load_format}: such weights need not be the files of the model's path",
            where,
        )


def _fingerprint(model_config: Any, load_config: Any, where: str) -> str:
    _check_files(load_config, where)
    model = str(getattr(model_config, "model_weights", "") or model_config.model)
    path = local_checkpoint(model, model_config.revision, load_config.download_dir, where)
    found = kvw.fingerprint(path) + _files_chosen(load_config)
    changed = changed_file(model_config, model, path)
    if not changed:
        return found
    _log.warning(
        "kvwarehouse: %s has changed since this engine began, and nobody can tell which weights it"
        " has loaded. What it stores it shares with nobody: start it again",
        changed,
    )
    return f"{found}/{os.urandom(16).hex()}"


def _files_chosen(load_config: Any) -> str:
    """Of several kinds of files in one folder a loader reads its own."""
    extra = getattr(load_config, "model_loader_extra_config", None) or {}
    pattern = extra.get("pattern")
    load_format = str(load_config.load_format)
    named = "" if load_format == "auto" else f"/{load_format}"
    return f"{named}/{digest_of(pattern)}" if pattern else named


def draft_weights(vllm_config: Any, settings: GivenWeights, target: str, where: str = WHERE) -> str:
    """The fingerprint of a draft's weights; target: the model's, which it is where they are the
    same files. A name given in place of the weights' fingerprint stands for the draft's too. Raises
    as weights_fingerprint() does."""
    draft = compat.draft_model(vllm_config)
    if settings.weights or draft is None or draft.model == vllm_config.model_config.model:
        return target
    own = getattr(vllm_config.speculative_config, "draft_load_config", None)
    return _fingerprint(draft, own or vllm_config.load_config, where)


def draft_identity(vllm_config: Any, settings: GivenWeights, target: str) -> str:
    """Of what a draft's KV depends on, beside the target; "" where blocks hold none. target: the
    fingerprint of the model's weights."""
    draft = compat.draft_model(vllm_config)
    if draft is None:
        return ""
    speculative = vllm_config.speculative_config
    parallel = getattr(speculative, "draft_parallel_config", None)
    return digest_of(
        {
            "config": config_digest(draft.hf_config),
            "dtype": str(draft.dtype),
            "lookahead": compat.draft_lookahead_tokens(vllm_config),
            "method": str(speculative.method),
            "quantization": str(draft.quantization or ""),
            "shards": getattr(parallel, "tensor_parallel_size", None),
            "weights": draft_weights(vllm_config, settings, target),
        }
    )


def one_of_all(by_rank: Mapping[tuple[int, int], CacheInfo]) -> tuple[CacheInfo, str]:
    """What all workers saw of their tensors, by pipeline stage and rank within it, and Shared's
    `stages`. Raises UsageError where they differ in more than the layers of stages and the memory
    for stores: all parts of a page have the same size and layout. What one rank has no room for is
    not stored, so the least memory of all counts."""
    kinds = {_of_pages(seen) for seen in by_rank.values()}
    if len(kinds) != 1:
        raise kvw.UsageError(
            f"the ranks of this engine have caches of {len(kinds)} kinds: {kinds}; kvwarehouse"
            " serves equal shards only. Pipeline stages have equal ones where they have equally"
            " many layers (VLLM_PP_LAYER_PARTITION)",
            code="unsupported",
        )
    layers = {
        stage: [group.layer_names for group in seen.groups]
        for (stage, _), seen in sorted(by_rank.items(), key=lambda item: item[0])
    }
    least = min(seen.staging_bytes for seen in by_rank.values())
    seen_by_all = replace(by_rank[min(by_rank)], staging_bytes=least)
    return seen_by_all, digest_of(list(layers.values())) if len(layers) > 1 else ""


def _of_pages(seen: CacheInfo) -> CacheInfo:
    """Without what ranks may differ in: GPUs of one kind can have some MiB more or less."""
    groups = tuple(replace(group, layer_names=()) for group in seen.groups)
    return replace(seen, groups=groups, staging_bytes=0)


def namespaces(
    vllm_config: Any,
    groups: Sequence[CacheGroup],
    cache_info: CacheInfo,
    shared: Shared,
) -> tuple[kvw.Namespace, ...]:
    """One for each group, in their order."""
    model = vllm_config.model_config
    options = options_digest(vllm_config)
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
                    **({"draft": shared.draft} if shared.draft else {}),
                    **({"options": options} if options else {}),
                    **({"stages": shared.stages} if shared.stages else {}),
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
