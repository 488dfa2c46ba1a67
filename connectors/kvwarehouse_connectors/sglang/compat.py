"""Everything of SGLang that differs, or may come to differ, between its versions. Nothing else here
knows a version; nothing else imports from SGLang, but plugin.py, which has its methods' names.

Written against 0.5.23, the first version served (HiCacheStorage as of its hicache_storage.py).
Imported in SGLang's processes only. Stateless.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_context

from kvwarehouse_connectors.sglang.counts import Calls
from kvwarehouse_connectors.sglang.engine_info import EngineInfo, PoolInfo, RankInfo
from kvwarehouse_connectors.sglang.weight_updates import UPDATES

__all__ = ["KV", "VERSION", "HiCacheStorage", "PoolHitPolicy", "PoolTransferResult"]

VERSION = metadata.version("sglang")
KV = PoolName.KV.value

# Exact types: a subclass may keep other things in its pages.
_KINDS = {
    "MHATokenToKVPoolHost": "mha",
    "AsymmetricMHATokenToKVPoolHost": "mha",
    "MLATokenToKVPoolHost": "mla",
    "DSAIndexerPoolHost": "index",
    "MambaPoolHost": "state",
}

# Of the resolved configuration: what KV, or the bytes of it, may depend on. The weights' own
# config.json is part of their fingerprint.
_CONFIG = (
    "attention_backend",
    "context_length",
    "decode_attention_backend",
    "dtype",
    "enable_multimodal",
    "fp8_gemm_runner_backend",
    "is_embedding",
    "json_model_override_args",
    "kt_max_deferred_experts_per_token",
    "kt_method",
    "kt_num_gpu_experts",
    "kv_cache_dtype",
    "load_format",
    "modelopt_quant",
    "model_impl",
    "page_size",
    "prefill_attention_backend",
    "quantization",
    "quantization_param_path",
    "rl_quant_profile",
)

# Of it: paths of what is computed with beside the model's own files, or in their place.
_CHECKPOINTS = ("kt_weight_path", "modelopt_checkpoint_restore_path")

# Of a pool: what tells its bytes apart beside its layout, where it has it.
_SHAPE = (
    "conv_dtype",
    "conv_state_shapes",
    "end_layer",
    "head_dim",
    "head_group_num",
    "index_head_dim",
    "indexer_dtype",
    "indexer_page_stride_size",
    "kv_cache_dim",
    "kv_lora_rank",
    "layer_num",
    "num_mamba_layers",
    "qk_rope_head_dim",
    "storage_format_tag",
    "start_layer",
    "target_layer_num",
    "temporal_dtype",
    "temporal_state_shape",
    "v_head_dim",
)


def engine_info(storage_config: Any) -> EngineInfo:
    """Of the engine in this process. Without SGLang's configuration (parts of it in a test, or a
    program of one's own) there is nothing to tell the weights by."""
    served = str(storage_config.model_name or "")
    try:
        checkpoint = str(_leaf("model_path"))
    except ValueError as error:
        return EngineInfo(VERSION, model=served, problem=str(error), salted_keys=keys_have_salts())
    nodes = max(1, int(_leaf("nnodes") or 1))
    ranks = int(_leaf("tp_size")) * int(_leaf("pp_size"))
    dummy = str(_leaf("load_format")) == "dummy"
    return EngineInfo(
        VERSION,
        model=checkpoint,
        checkpoint=checkpoint,
        more_checkpoints={
            name: str(_leaf(name)) for name in _CHECKPOINTS if _leaf(name, None) is not None
        },
        revision=_leaf("revision"),
        cache_dir=_leaf("download_dir"),
        config={name: str(_leaf(name, "")) for name in _CONFIG},
        adapters=_adapters(_leaf("lora_paths", None)),
        speculation=str(_leaf("speculative_algorithm", "") or ""),
        ranks_of_host=ranks // nodes,
        problem="load_format is dummy: such weights are in no file" if dummy else "",
        salted_keys=keys_have_salts(),
    )


def keys_have_salts() -> bool:
    """Whether the keys that this SGLang makes for its storage differ by a request's cache_salt and
    extra_key; they were of its tokens alone before 0.5.23 (sglang#38577). The first call of an
    installation compiles SGLang's hash, as its first lookup would."""
    try:
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        keys = {
            str(get_storage_hash_str(RadixKey(array("q", [1, 2]), extra, cache_salt=salt)))
            for extra, salt in ((None, None), (None, "x"), (None, "y"), ("x", None))
        }
    except (ImportError, AttributeError, TypeError):
        return False
    return len(keys) == 4


def rank_info(storage_config: Any) -> RankInfo:
    return RankInfo(
        tp_rank=storage_config.tp_rank,
        tp_size=storage_config.tp_size,
        pp_rank=storage_config.pp_rank,
        pp_size=storage_config.pp_size,
        cp_size=storage_config.attn_cp_size,
        dcp_size=storage_config.dcp_size,
        latent=storage_config.is_mla_model,
        tp_lcm_size=storage_config.tp_lcm_size or 0,
    )


def pool_info(pool: Any, name: str) -> PoolInfo:
    return PoolInfo(
        name=name,
        kind=_KINDS.get(type(pool).__name__, ""),
        type_name=type(pool).__name__,
        layout=str(pool.layout),
        page_tokens=int(pool.page_size),
        dtype=str(pool.dtype).removeprefix("torch."),
        shape={key: str(getattr(pool, key)) for key in _SHAPE if hasattr(pool, key)},
        heads=int(getattr(pool, "head_num", 0)),
        problem=_pool_problem(pool),
    )


def weights_mark() -> object:
    """Something that changes before the weights of a running engine do, or with the version that
    SGLang is told with them."""
    try:
        return UPDATES.writes, get_context().config_leaf("weight_version")
    except ValueError:
        return UPDATES.writes, None


def weights_changed_before() -> bool:
    """Whether the engine's weights are others than those it began with."""
    try:
        return bool(
            UPDATES.writes or _leaf("weight_version") != get_context().server_args.weight_version
        )
    except (ValueError, AttributeError):
        return UPDATES.writes > 0


def storage_metrics(loads: Calls, stores: Calls) -> Any:
    """As SGLang's storage_metrics_collector takes them: pages, and GiB a second, of each call."""
    from sglang.srt.observability.metrics_collector import StorageMetrics

    return StorageMetrics(
        prefetch_pgs=list(loads.pages),
        backup_pgs=list(stores.pages),
        prefetch_bandwidth=list(loads.rates),
        backup_bandwidth=list(stores.rates),
    )


def pool_name(name: Any) -> str:
    """A PoolName, or its text."""
    return str(getattr(name, "value", name))


def _pool_problem(pool: Any) -> str:
    if getattr(pool, "kv_buffer", None) is None:
        return "keeps no bytes of its own on this rank"
    if getattr(pool, "_layer_shard_enabled", False):
        return "has some of the layers only"
    if getattr(pool, "shared_allocation_domain", None) is not None:
        return "shares its memory with other pools"
    return ""


def _adapters(paths: Sequence[Any] | None) -> dict[str, str]:
    return {str(one.lora_name): str(one.lora_path) for one in paths or ()}


_REQUIRED = object()


def _leaf(name: str, otherwise: Any = _REQUIRED) -> Any:
    """Of the resolved configuration. Raises ValueError where there is none, or where this version
    has no such name."""
    try:
        return get_context().config_leaf(name)
    except ValueError:
        if otherwise is _REQUIRED:
            raise
        return otherwise
