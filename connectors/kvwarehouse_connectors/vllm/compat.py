"""Everything of vLLM that differs, or may come to differ, between its versions. Nothing else here
knows a version; nothing else imports from vLLM but the connector's base classes, re-exported here.

Written against 0.32.0, the first version served (KVConnectorBase_V1 as of its base.py). Imported
in vLLM's processes only. Stateless.
"""

from __future__ import annotations

import hashlib
import logging
import re
from typing import Any

import torch
import vllm
from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.metrics.cache_hit_source import CacheHitSource

__all__ = [
    "MEDIUM_CPU",
    "VERSION",
    "AllBlocksCleared",
    "BlockStored",
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "join_logs",
]

VERSION = str(vllm.__version__)


def join_logs() -> None:
    """Lets the connector's log lines go where vLLM's go; by itself only warnings would be seen."""
    ours, theirs = logging.getLogger("kvwarehouse_connectors"), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = not theirs.handlers


# Methods of speculative decoding that keep no KV of their own.
_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
# blake3 and sha256, or sha512: a plain UUID has 32 digits.
_CONTENT_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")

# Exact types: a subclass may keep other things in its blocks.
_KINDS = {
    "FullAttentionSpec": "full_attention",
    "SinkFullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MambaSpec": "mamba",
}


def group_spec(group: Any) -> Any:
    """The spec of a cache group; of layers that differ in size only, that of the first."""
    spec = group.kv_cache_spec
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def spec_kind(spec: Any) -> str:
    """full_attention, mla, sliding_window, chunked_local or mamba; "" for what is not known."""
    return _KINDS.get(type(spec).__name__, "")


def group_problem(group: Any) -> str:
    """Why a cache group cannot be served, as what "it" does; "" where it can."""
    spec = group.kv_cache_spec
    inner = (
        list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    )
    names = sorted({type(one).__name__ for one in inner})
    if len({spec_kind(one) for one in inner}) != 1 or not spec_kind(inner[0]):
        return f"keeps its KV as {', '.join(names)}"
    if not group.enable_kv_transfer or group.host_resident or not spec.prefix_cacheable:
        return f"keeps KV ({names[0]}) that vLLM does not cache by prefix"
    if group.is_eagle_group:
        return "belongs to a draft model (EAGLE, MTP), whose KV depends on the token after it"
    if getattr(inner[0], "extra_retained_tokens", 0):
        return "keeps more of a window than it attends to, for a draft model"
    if names == ["MambaSpec"] and inner[0].mamba_cache_mode != "align":
        return (
            f"keeps states in the mode {inner[0].mamba_cache_mode!r}; only 'align' has checkpoints"
            " (it is vLLM's own choice with --enable-prefix-caching)"
        )
    return ""


def engine_problem(vllm_config: Any) -> str:
    """Why an engine of this configuration cannot be served, as what "it" does; "" where it can."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "splits its layers over pipeline stages (pipeline_parallel_size > 1)"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"splits the context over ranks ({name} > 1)"
    if vllm_config.model_config.is_encoder_decoder:
        return "is an encoder-decoder model"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTS_WITHOUT_KV:
        return (
            f"drafts tokens by {speculative.method!r}: a draft's KV depends on tokens that are not"
            f" in a block's key (served: {', '.join(_DRAFTS_WITHOUT_KV)})"
        )
    return ""


def draft_model(vllm_config: Any) -> Any | None:
    """The ModelConfig of the draft model, whose KV the engine keeps beside its own; None without
    one. Of MTP it is the model itself."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _DRAFTS_WITHOUT_KV:
        return None
    return speculative.draft_model_config


def own_media(request: Any) -> bool:
    """Whether media of a request are named by anything but a digest of their content: by a counter
    of this engine, or by the client. Such a name means nothing to another engine."""
    return any(
        not _CONTENT_DIGEST.fullmatch(str(feature.identifier).rpartition(":")[2])
        for feature in request.mm_features or ()
    )


def publishes_events(vllm_config: Any) -> bool:
    """Whether the engine has been asked to publish KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return bool(config is not None and config.enable_kv_cache_events)


def tp_replicas(kv_cache_config: Any) -> int:
    """Consecutive ranks that hold the same KV (MLA, or fewer KV heads than ranks)."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)


def by_manager_block(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer's cache with the scheduler's blocks as dimension 0; kernels may use smaller ones."""
    return tensor if tensor.shape[0] == num_blocks else tensor.unflatten(0, (num_blocks, -1))


def attention_backends(vllm_config: Any, layer_names: tuple[str, ...]) -> str:
    """Names of the layers' attention backends, and on a CPU of the instruction set they pack KV
    for: the bytes of a block depend on both."""
    layers = vllm_config.compilation_config.static_forward_context
    names = sorted({layers[name].get_attn_backend().get_name() for name in layer_names})
    return "+".join(names)


def instruction_set(vllm_config: Any, spec: Any) -> str:
    """What a CPU's attention packs its blocks for, such as "AVX512/vec"."""
    from vllm.v1.attention.backends import cpu_attn

    capability = str(torch.backends.cpu.get_cpu_capability())
    head_size = getattr(spec, "head_size", None)
    try:
        packed = cpu_attn._get_attn_isa(
            spec.dtype, spec.block_size, head_size, vllm_config.cache_config.cache_dtype
        )
    except (AttributeError, NotImplementedError, TypeError):
        packed = "?"
    return f"{capability}/{packed}"


def hash_algorithm(vllm_config: Any) -> str:
    return str(vllm_config.cache_config.prefix_caching_hash_algo)


def hash_scheme(vllm_config: Any) -> str:
    """Names how this engine makes block hashes, with a probe of the function and its seed: what
    hashes differently has another name."""
    algorithm = hash_algorithm(vllm_config)
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)  # the engine does the same, later in its start
    probe = kv_cache_utils.hash_block_tokens(function, None, [1, 2, 3], (("cache_salt", "x"),))
    return f"vllm/{algorithm}/{hashlib.blake2b(bytes(probe), digest_size=8).hexdigest()}"


def extra_keys(request: Any, begin: int, end: int, mm_index: int) -> tuple[Any, int]:
    """What vLLM hashes beside the tokens begin..end of a request: LoRA, media, salt, embeddings."""
    found = kv_cache_utils.generate_block_hash_extra_keys(request, begin, end, mm_index)
    return found[0], int(found[1])


def event_hash(block_hash: bytes) -> Any:
    """A block hash as vLLM's events carry it."""
    return kv_cache_utils.maybe_convert_block_hash(block_hash)
