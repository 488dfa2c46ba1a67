"""Public architectures by name, as the fields that their config.json publishes.

They pass through the same reader as a local config.json. Parameters are in billions, as their
makers state them: all, and those that one token passes through (a mixture of experts). Read-only.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from kvwarehouse.errors import UsageError
from kvwarehouse.model.architecture import Architecture
from kvwarehouse.model.config import ConfigFields, architecture_of


@dataclass(frozen=True)
class _KnownModel:
    fields: dict[str, Any]
    params: float
    active: float


def _gqa(
    shape: tuple[int, int, int, int, int], params: float, active: float = 0.0, **more: Any
) -> _KnownModel:
    """`shape`: layers, KV heads, head dimension, attention heads, hidden size."""
    names = (
        "num_hidden_layers",
        "num_key_value_heads",
        "head_dim",
        "num_attention_heads",
        "hidden_size",
    )
    return _KnownModel({**dict(zip(names, shape, strict=True)), **more}, params, active or params)


def _mla(
    layers: int, heads: int, hidden: int, params: float, active: float, **more: Any
) -> _KnownModel:
    fields = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        **more,
    }
    return _KnownModel(fields, params, active)


_GEMMA2: dict[str, Any] = {"model_type": "gemma2", "sliding_window": 4096}
_GEMMA3: dict[str, Any] = {"model_type": "gemma3_text", "sliding_window_pattern": 6}
_GPT_OSS: dict[str, Any] = {"model_type": "gpt_oss", "sliding_window": 128}
_LLAMA4: dict[str, Any] = {
    "model_type": "llama4_text",
    "attention_chunk_size": 8192,
    "no_rope_layer_interval": 4,
}
_QWEN3_NEXT: dict[str, Any] = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_NEMOTRON_H: dict[str, Any] = {
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}
_JAMBA: dict[str, Any] = {
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
}
_MAMBA: dict[str, Any] = {"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "expand": 2}

MODELS: dict[str, _KnownModel] = {
    "command-r-plus": _gqa((64, 8, 128, 96, 12288), 104),
    "deepseek-r1": _mla(61, 128, 7168, 671, 37),
    "deepseek-v2": _mla(60, 128, 5120, 236, 21),
    "deepseek-v2-lite": _mla(27, 16, 2048, 15.7, 2.4),
    "deepseek-v3": _mla(61, 128, 7168, 671, 37),
    "deepseek-v3.2": _mla(61, 128, 7168, 671, 37, index_head_dim=128),
    "falcon-7b": _gqa((32, 1, 64, 71, 4544), 7.2),
    "gemma-2-2b": _gqa((26, 4, 256, 8, 2304), 2.6, **_GEMMA2),
    "gemma-2-9b": _gqa((42, 8, 256, 16, 3584), 9.2, **_GEMMA2),
    "gemma-2-27b": _gqa((46, 16, 128, 32, 4608), 27.2, **_GEMMA2),
    "gemma-3-1b": _gqa((26, 1, 256, 4, 1152), 1.0, **_GEMMA3, sliding_window=512),
    "gemma-3-4b": _gqa((34, 4, 256, 8, 2560), 4.3, **_GEMMA3, sliding_window=1024),
    "gemma-3-12b": _gqa((48, 8, 256, 16, 3840), 12.2, **_GEMMA3, sliding_window=1024),
    "gemma-3-27b": _gqa((62, 16, 128, 32, 5376), 27.4, **_GEMMA3, sliding_window=1024),
    "glm-4.5": _gqa((92, 8, 128, 96, 5120), 355, 32),
    "glm-4.5-air": _gqa((46, 8, 128, 96, 4096), 106, 12),
    "gpt-2": _gqa((12, 12, 64, 12, 768), 0.124),
    "gpt-oss-20b": _gqa((24, 8, 64, 64, 2880), 20.9, 3.6, **_GPT_OSS),
    "gpt-oss-120b": _gqa((36, 8, 64, 64, 2880), 116.8, 5.1, **_GPT_OSS),
    "jamba-1.5-mini": _gqa((32, 8, 128, 32, 4096), 52, 12, **_JAMBA),
    "jamba-1.5-large": _gqa((72, 8, 128, 64, 8192), 398, 94, **_JAMBA),
    "kimi-k2": _mla(61, 64, 7168, 1000, 32),
    "llama-2-7b": _gqa((32, 32, 128, 32, 4096), 6.7),
    "llama-2-13b": _gqa((40, 40, 128, 40, 5120), 13),
    "llama-2-70b": _gqa((80, 8, 128, 64, 8192), 69),
    "llama-3-8b": _gqa((32, 8, 128, 32, 4096), 8.03),
    "llama-3-70b": _gqa((80, 8, 128, 64, 8192), 70.6),
    "llama-3.1-8b": _gqa((32, 8, 128, 32, 4096), 8.03),
    "llama-3.1-70b": _gqa((80, 8, 128, 64, 8192), 70.6),
    "llama-3.1-405b": _gqa((126, 8, 128, 128, 16384), 405.9),
    "llama-3.2-1b": _gqa((16, 8, 64, 32, 2048), 1.24),
    "llama-3.2-3b": _gqa((28, 8, 128, 24, 3072), 3.21),
    "llama-3.3-70b": _gqa((80, 8, 128, 64, 8192), 70.6),
    "llama-4-maverick": _gqa((48, 8, 128, 40, 5120), 400, 17, **_LLAMA4),
    "llama-4-scout": _gqa((48, 8, 128, 40, 5120), 109, 17, **_LLAMA4),
    "mamba-2.8b": _KnownModel({"num_hidden_layers": 64, "hidden_size": 2560, **_MAMBA}, 2.8, 2.8),
    "mistral-7b": _gqa((32, 8, 128, 32, 4096), 7.25),
    "mistral-7b-v0.1": _gqa((32, 8, 128, 32, 4096), 7.24, sliding_window=4096),
    "mistral-large-2": _gqa((88, 8, 128, 96, 12288), 123),
    "mistral-nemo-12b": _gqa((40, 8, 128, 32, 5120), 12.2),
    "mistral-small-3": _gqa((40, 8, 128, 32, 5120), 23.6),
    "mixtral-8x7b": _gqa((32, 8, 128, 32, 4096), 46.7, 12.9),
    "mixtral-8x22b": _gqa((56, 8, 128, 48, 6144), 141, 39),
    "nemotron-h-8b": _gqa((52, 8, 128, 32, 4096), 8.1, **_NEMOTRON_H),
    "phi-4": _gqa((40, 10, 128, 40, 5120), 14.7),
    "qwen2.5-0.5b": _gqa((24, 2, 64, 14, 896), 0.49),
    "qwen2.5-1.5b": _gqa((28, 2, 128, 12, 1536), 1.54),
    "qwen2.5-3b": _gqa((36, 2, 128, 16, 2048), 3.09),
    "qwen2.5-7b": _gqa((28, 4, 128, 28, 3584), 7.61),
    "qwen2.5-14b": _gqa((48, 8, 128, 40, 5120), 14.7),
    "qwen2.5-32b": _gqa((64, 8, 128, 40, 5120), 32.5),
    "qwen2.5-72b": _gqa((80, 8, 128, 64, 8192), 72.7),
    "qwen3-0.6b": _gqa((28, 8, 128, 16, 1024), 0.6),
    "qwen3-1.7b": _gqa((28, 8, 128, 16, 2048), 1.7),
    "qwen3-4b": _gqa((36, 8, 128, 32, 2560), 4.0),
    "qwen3-8b": _gqa((36, 8, 128, 32, 4096), 8.2),
    "qwen3-14b": _gqa((40, 8, 128, 40, 5120), 14.8),
    "qwen3-32b": _gqa((64, 8, 128, 64, 5120), 32.8),
    "qwen3-30b-a3b": _gqa((48, 4, 128, 32, 2048), 30.5, 3.3),
    "qwen3-235b-a22b": _gqa((94, 4, 128, 64, 4096), 235, 22),
    "qwen3-next-80b-a3b": _gqa((48, 2, 256, 16, 2048), 80, 3, **_QWEN3_NEXT),
    "tinyllama-1.1b": _gqa((22, 4, 64, 32, 2048), 1.1),
}

# Of a name, what says nothing about the architecture.
_TUNING = re.compile(
    r"-(instruct|chat|it|base|hf|fp8|awq|gptq|bf16|thinking|128e|16e|17b|0324|0528|\d{4})(?=-|$)"
)


def find_model(name: str) -> Architecture:
    """By its name, however it is written: `meta-llama/Llama-3.3-70B-Instruct` is llama-3.3-70b.
    Raises UsageError that names the nearest known ones."""
    plain = _normalised(name)
    known = MODELS.get(plain)
    if known is None:
        near = difflib.get_close_matches(plain, MODELS, n=3, cutoff=0.5)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise UsageError(
            f"the model {name!r} is not in the table{hint}; see `kvwarehouse size --list`, or give"
            " --config with the path of its config.json",
            code="unknown_model",
        )
    fields = ConfigFields(known.fields, f"the table's {plain}")
    return architecture_of(
        fields, name=plain, params=known.params * 1e9, active_params=known.active * 1e9
    )


def _normalised(name: str) -> str:
    plain = name.strip().lower().rpartition("/")[2].replace("_", "-").replace(" ", "-")
    plain = plain.removeprefix("meta-")
    if plain in MODELS:
        return plain
    plain = _TUNING.sub("", plain)
    return re.sub(r"^(llama|qwen|gemma|gpt|mistral|mixtral)(\d)(?!\d*x)", _spelled, plain)


def _spelled(match: re.Match[str]) -> str:
    """`llama3.3` is called llama-3.3; Qwen writes its number without a dash."""
    family, number = match.groups()
    return f"{family}{number}" if family == "qwen" else f"{family}-{number}"
