"""Everything of vLLM that differs, or may come to differ, between its versions. Nothing else here
knows a version; nothing else imports from vLLM but the connector's base classes, re-exported here.

Written against 0.32.0, the first version served (KVConnectorBase_V1 as of its base.py). Imported
in vLLM's processes only. Stateless.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import vllm
from vllm import envs
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
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
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


# Draft heads of one layer, which see the target's hidden state of a token and the token after it.
_ONE_TOKEN_AHEAD = ("eagle", "eagle3")
_MTP_MODELS = (
    "DeepSeekMTPModel",
    "ErnieMTPModel",
    "Glm4MoeMTPModel",
    "MiMoMTPModel",
    "Qwen3NextMTP",
)
# Methods of speculative decoding that keep no KV of their own.
_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
# blake3 and sha256, or sha512: a plain UUID has 32 digits.
_CONTENT_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
# At the end of a name that is no digest of content, and of every digest of such a name.
_NAMED = "-named"
# Among the settings of vLLM's own in kv_connector_extra_config, so that it goes wherever they go.
_MARKS = "kvwarehouse_marks_named_media"

# Exact types: a subclass may keep other things in its blocks.
_KINDS = {
    "FullAttentionSpec": "full_attention",
    "SinkFullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MambaSpec": "mamba",
}
# Whose blocks' bytes are not what their keys say, whoever keeps them.
_INEXACT = {
    "RSWASpec": "what a generated token's KV depends on ends with its prompt, and no key says where"
    " that was",
    "CrossAttentionSpec": "it depends on an encoder's input, which no key says",
    "EncoderOnlyAttentionSpec": "it depends on tokens behind it, which no key says",
}
# What vLLM's own offloading leaves out or takes, and so WarehouseTier.
_FOR_THE_TIER = {
    "CircularBufferSpec": "one block for each request, written over again and again",
    "HiSparseHotSpec": "a request's own copies of rows whose place is in host memory",
    "HiSparseResidentSpec": "a request's own copies of rows whose place is in host memory",
    "HiddenStateCacheSpec": "no KV, but hidden states",
    "SlidingWindowMLASpec": "windows of latent rows, with which no engine was tried",
}


def request_name(request_id: str) -> str:
    """A request's id, beginning as its client was told: of several samples each one's number stands
    in front (vllm/v1/engine/parallel_sampling.py)."""
    sample = re.fullmatch(r"(\d+)_(.+)", request_id, re.DOTALL)
    return f"{sample[2]}_{sample[1]}" if sample else request_id


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
    kinds = {spec_kind(one) for one in inner}
    # Index keys beside full attention (MiniMax-M3): of both a block depends on its prefix alone.
    if "" in kinds or (len(kinds) > 1 and kinds != {"full_attention", "mla"}):
        return f"keeps its KV as {', '.join(names)}: {_why_unserved(names)}"
    if not group.enable_kv_transfer or group.host_resident or not spec.prefix_cacheable:
        return f"keeps KV ({names[0]}) that vLLM does not cache by prefix"
    if getattr(inner[0], "extra_retained_tokens", 0):
        return "keeps more of a window than it attends to, for a draft model"
    if names == ["MambaSpec"] and inner[0].mamba_cache_mode != "align":
        return (
            f"keeps states in the mode {inner[0].mamba_cache_mode!r}; only 'align' has checkpoints"
            " (it is vLLM's own choice with --enable-prefix-caching)"
        )
    return ""


def inexact_kind(kv_cache_config: Any) -> str:
    """The cache kind, and why, of which no block may be kept for others; "" where there is none."""
    for group in kv_cache_config.kv_cache_groups:
        name = type(group_spec(group)).__name__
        if name in _INEXACT:
            return f"keeps its KV as {name}: {_INEXACT[name]}"
    return ""


def _why_unserved(names: list[str]) -> str:
    for name in names:
        if name in _INEXACT:
            return _INEXACT[name]
    known = [_FOR_THE_TIER[name] for name in names if name in _FOR_THE_TIER]
    mixed = "several kinds in one group" if len(names) > 1 else "a kind that is not known here"
    return f"{known[0] if known else mixed}. WarehouseTier keeps what of it vLLM can offload"


def engine_problem(vllm_config: Any) -> str:
    """Why an engine of this configuration cannot be served, as what "it" does; "" where it can."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        return "spreads its ranks over several hosts, and no daemon would have whole pages"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"splits the context over ranks ({name} > 1)"
    if vllm_config.model_config.is_encoder_decoder:
        return "is an encoder-decoder model"
    return _draft_problem(vllm_config.speculative_config)


def _draft_problem(speculative: Any) -> str:
    if speculative is None or speculative.method in _DRAFTS_WITHOUT_KV:
        return ""
    method = speculative.method
    served = (*_DRAFTS_WITHOUT_KV, "draft_model", *_ONE_TOKEN_AHEAD, "mtp")
    if method not in served:
        return (
            f"drafts tokens by {method!r}: it is not known on what such a draft's KV depends"
            f" (served: {', '.join(served)})"
        )
    if getattr(speculative, "parallel_drafting", False):
        return f"drafts several tokens at once ({method!r} with parallel_drafting)"
    if method == "mtp":
        config = speculative.draft_model_config.hf_config
        names = [str(name) for name in config.architectures or ()]
        if not set(names) <= set(_MTP_MODELS) or getattr(config, "n_predict", 0) != 1:
            return (
                f"drafts tokens by {method!r} with {', '.join(names)}"
                f" ({getattr(config, 'n_predict', 0)} layers; served: one layer of"
                f" {', '.join(_MTP_MODELS)})"
            )
    return ""


def draft_model(vllm_config: Any) -> Any | None:
    """The ModelConfig of the draft, whose KV blocks hold beside the target's; None without one. Of
    MTP it is the model itself."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _DRAFTS_WITHOUT_KV:
        return None
    return speculative.draft_model_config


def draft_lookahead_tokens(vllm_config: Any) -> int:
    """On so many tokens behind a block a draft's KV in it depends. A draft model of its own sees
    none of them."""
    own_model = vllm_config.speculative_config.method == "draft_model"
    return 0 if own_model else 1


def draft_limit_tokens(vllm_config: Any) -> int:
    """The length of a request from which on a step may have no draft. Twice what is drafted is
    left beneath vLLM's own limit: with asynchronous scheduling lengths run ahead."""
    speculative = vllm_config.speculative_config
    longest = int(vllm_config.model_config.max_model_len)
    own = getattr(speculative.draft_model_config, "max_model_len", None)
    return min(longest, int(own or longest)) - 2 * (int(speculative.num_speculative_tokens) + 1)


def media_or_embeddings(request: Any) -> bool:
    """Whether a token's id does not say all of what the model is given for it."""
    return bool(request.mm_features) or getattr(request, "prompt_embeds", None) is not None


def models_with(vllm_config: Any, layers: Iterable[str]) -> list[torch.nn.Module]:
    """The models, a draft's too, that have these layers; no hook of a connector is given them.
    Takes a few tenths of a second: it looks at all that Python knows."""
    known = vllm_config.compilation_config.static_forward_context
    parents: dict[int, list[torch.nn.Module]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Module):  # some things pretend to be of other classes
            for child in thing._modules.values():
                parents.setdefault(id(child), []).append(thing)
    found: dict[int, torch.nn.Module] = {}
    here = [known[name] for name in layers if name in known]
    climbing = [parent for layer in here for parent in parents.get(id(layer), [])]
    while climbing:
        module = climbing.pop()
        if id(module) not in found:
            found[id(module)] = module
            climbing += parents.get(id(module), [])
    return [module for module in found.values() if id(module) not in parents]


def moving_tensors(vllm_config: Any, models: Iterable[torch.nn.Module]) -> Callable[[str], bool]:
    """By name, what changes while a model stays the same: buffers, some of which are counters, and
    experts that move from rank to rank to balance their load."""
    balanced = bool(getattr(vllm_config.parallel_config, "enable_eplb", False))
    buffers = {name for name, _ in torch.nn.ModuleList(models).named_buffers()}
    return lambda name: name in buffers or (balanced and "experts" in name)


def cache_content(kv_cache_manager: Any) -> Any:
    """An object that is another one after each reset of vLLM's prefix cache; None where there is
    no telling."""
    pool = getattr(kv_cache_manager, "block_pool", None)
    return getattr(pool, "cached_block_hash_to_block", None)


def own_media(request: Any, vllm_config: Any) -> bool:
    """Whether media of a request are, or may be, named by anything but a digest of their content:
    by a counter of this engine, or by the client. Such a name means nothing to another engine."""
    if not request.mm_features:
        return False
    marks = vllm_config.kv_transfer_config.kv_connector_extra_config.get(_MARKS)
    return not marks or not all(_by_content(feature) for feature in request.mm_features)


def _by_content(feature: Any) -> bool:
    """An adapter's name may stand before it."""
    return bool(_CONTENT_DIGEST.fullmatch(str(feature.identifier).rpartition(":")[2]))


def mark_named_media(vllm_config: Any) -> None:
    """In the process that takes this engine's requests: from now on own_media() can tell. A client
    may give a name of a digest's form, and vLLM takes it as it is, or makes a digest of the name.
    vLLM's frontend in Rust does that by itself, and there is no telling; an encoder in an engine of
    its own hands its output on under the names, which must be the same in all engines, also those
    without this connector."""
    if envs.VLLM_USE_RUST_FRONTEND or getattr(vllm_config, "ec_transfer_config", None) is not None:
        return
    if not getattr(MultiModalHasher, "marked_by_kvwarehouse", False):
        _mark_names_in(ProcessorInputs, MultiModalHasher)
    vllm_config.kv_transfer_config.kv_connector_extra_config[_MARKS] = True


def _mark_names_in(inputs: Any, hasher: Any) -> None:
    names_of, digest_of = inputs.get_mm_hashes, hasher.hash_kwargs

    @functools.wraps(names_of)
    def get_mm_hashes(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {
            modality: [None if name is None else _marked(name) for name in names]
            for modality, names in (self.mm_uuid_items or {}).items()
        }
        return names_of(dataclasses.replace(self, mm_uuid_items=given), *args, **kwargs)

    @functools.wraps(digest_of)
    def hash_kwargs(*args: Any, **kwargs: Any) -> str:
        digest = digest_of(*args, **kwargs)
        named = any(isinstance(v, str) and v.endswith(_NAMED) for v in kwargs.values())
        return _marked(digest) if named else digest

    inputs.get_mm_hashes = get_mm_hashes
    hasher.hash_kwargs = staticmethod(hash_kwargs)
    hasher.marked_by_kvwarehouse = True


def _marked(name: str) -> str:
    return name if name.endswith(_NAMED) else name + _NAMED


def publishes_events(vllm_config: Any) -> bool:
    """Whether the engine has been asked to publish KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return bool(config is not None and config.enable_kv_cache_events)


def tp_replicas(kv_cache_config: Any) -> int:
    """Consecutive ranks that hold the same KV (MLA, or fewer KV heads than ranks)."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)


def shards(vllm_config: Any, kv_cache_config: Any) -> int:
    """Parts of which each page consists: one for each pipeline stage, and in it for each rank, or
    for those that hold the same."""
    parallel = vllm_config.parallel_config
    in_a_stage = parallel.tensor_parallel_size // tp_replicas(kv_cache_config)
    return int(parallel.pipeline_parallel_size * in_a_stage)


def shard(vllm_config: Any, kv_cache_config: Any) -> tuple[int, bool]:
    """Which part this worker holds, and whether it is the one that stores it."""
    parallel, replicas = vllm_config.parallel_config, tp_replicas(kv_cache_config)
    stage, rank = divmod(int(parallel.rank), int(parallel.tensor_parallel_size))
    in_a_stage = int(parallel.tensor_parallel_size) // replicas
    # vLLM numbers the ranks of a stage one after the other, and stage after stage.
    stage %= int(parallel.pipeline_parallel_size)
    return stage * in_a_stage + rank // replicas, rank % replicas == 0


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


def event_fields(kv_cache_config: Any) -> dict[int, dict[str, Any]]:
    """What vLLM's events say of each cache group, by which readers tell groups apart."""
    return {
        index: {
            "kv_cache_spec_kind": get_kv_cache_spec_kind(group.kv_cache_spec).value,
            "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            "locality": "LOCAL",
        }
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    }


def event_hash(block_hash: bytes) -> Any:
    """A block hash as vLLM's events carry it."""
    return kv_cache_utils.maybe_convert_block_hash(block_hash)
