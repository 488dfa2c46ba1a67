"""Options of an engine that change its KV and stand neither in its model's config nor in what its
workers see of their caches. Each is part of the namespaces where somebody has set it.

The test of this file lists all of vLLM's options, and says of each other one why it is not here.
What only rounds otherwise, such as another kernel of the same formula, is not: other batches do
that too. What computes with other precision is.

Stateless. Reads one small file, where an option names it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvwarehouse_connectors.core.identity import digest_of

CHANGE_KV: dict[str, dict[str, Any]] = {
    "": {"additional_config": {}},
    "attention_config": {
        "disable_flashinfer_q_quantization": False,
        "indexer_kv_dtype": "auto",
        "indexer_sparse_logits": False,
        "use_prefill_query_quantization": False,
    },
    "cache_config": {
        "kv_cache_dtype_skip_layers": [],
        "kv_sharing_fast_prefill": False,
        "mamba_cache_dtype": "auto",
        "mamba_ssm_cache_dtype": "auto",
        "replayssm_buffer_len": 16,
        "swa_bounded_replay": True,
        "use_replayssm": False,
    },
    "diffusion_config": {"canvas_length": None},
    "kernel_config": {
        "linear_backend": "auto",
        "linear_backend_per_quant": {},
        "moe_backend": "auto",
    },
    "lora_config": {
        "enable_moe_shared_loras": False,
        "enable_tower_connector_lora": False,
        "lora_dtype": "auto",
        "target_modules": None,
    },
    "mamba_config": {
        "enable_stochastic_rounding": False,
        "stochastic_rounding_philox_rounds": 0,
    },
    "model_config": {
        "code_revision": None,
        "model_class_overrides": {},
        "model_impl": "auto",
        "quantization_config": None,
        "trust_remote_code": False,
    },
    "model_config.multimodal_config": {
        "language_model_only": False,
        "media_io_kwargs": {},
        "mm_encoder_attn_dtype": None,
        "mm_encoder_fp8_scale_path": None,
        "mm_processor_kwargs": None,
        "video_pruning_method": "evs",
        "video_pruning_rate": None,
    },
    "speculative_config": {
        "code_revision": None,
        "index_share_for_mtp_iteration": None,
        "kv_cache_dtype": None,
        "max_model_len": None,
        "moe_backend": None,
        "quantization": None,
        "use_heterogeneous_vocab": False,
    },
}
"""By the place of a part of vLLM's configuration: an option, and its value where nobody sets it."""

ENVIRONMENT = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": "",
    "VLLM_CPU_INT4_W4A8": "",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": "",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": "",
    "VLLM_FLOAT32_MATMUL_PRECISION": "",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": "",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": "",
    "VLLM_MARLIN_INPUT_DTYPE": "",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "",
    "VLLM_SSM_CONV_STATE_LAYOUT": "SD",
    "VLLM_VIDEO_LOADER_BACKEND": "",
}
"""Variables of the same kind, and what they say where nobody sets them: a platform may."""

_OF_STATES = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
_FILES = ("mm_encoder_fp8_scale_path",)


def options_digest(vllm_config: Any) -> str:
    """Of the options that change KV and are set; "" where none is. Raises OSError where a file that
    one of them names cannot be read."""
    found = set_options(vllm_config)
    return digest_of(found) if found else ""


def set_options(vllm_config: Any) -> dict[str, Any]:
    """Plain values by "PLACE.NAME", and by the names of variables."""
    found = {}
    for place, options in CHANGE_KV.items():
        part = _part(vllm_config, place)
        for name, unset in options.items():
            value = getattr(part, name, unset)
            if value not in (unset, None, {}, []) and not _by_itself(vllm_config, name, value):
                kept = _content(value) if name in _FILES else _plain(value)
                found[f"{place}.{name}".strip(".")] = kept
    for name, unset in ENVIRONMENT.items():
        value = os.environ.get(name, "")
        if value not in ("", unset):
            found[name] = value
    return found


def _by_itself(vllm_config: Any, name: str, value: Any) -> bool:
    """Whether vLLM puts this value there where nobody sets one: the model's type for adapters, and
    a platform's for states, of models too that have none."""
    model = vllm_config.model_config
    if name in _OF_STATES:
        return not getattr(model, "has_inner_state", False)
    return name == "lora_dtype" and value == model.dtype


def _part(vllm_config: Any, place: str) -> Any:
    """None where the engine has no such part."""
    part = vllm_config
    for name in filter(None, place.split(".")):
        part = getattr(part, name, None)
    return part


def _content(path: str) -> str:
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """The same in every process: no addresses, and sets in order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(one)) for one in value)
    if callable(getattr(value, "compute_hash", None)):  # additional_config of a platform
        return str(value.compute_hash())
    return value
