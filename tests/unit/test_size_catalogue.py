"""The shipped table of models, against configurations as their makers publish them and against the
table of another calculator."""

from __future__ import annotations

from typing import Any

import pytest

from kvwarehouse.model.catalogue import MODELS, find_model
from kvwarehouse.model.config import ConfigFields, architecture_of
from kvwarehouse.model.footprint import Footprint, find_dtype

WINDOWS_THEN_FULL = ["sliding_attention"] * 5 + ["full_attention"]
DELTAS_THEN_FULL = ["linear_attention"] * 3 + ["full_attention"]
K3_FULL = [*range(4, 93, 4), 93]

# The fields of published config.json files that say how large the KV is.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-4-31b": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            "attention_k_eq_v": True,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_size": 5376,
            "layer_types": WINDOWS_THEN_FULL * 10,
            "num_attention_heads": 32,
            "num_global_key_value_heads": 4,
            "num_hidden_layers": 60,
            "num_key_value_heads": 16,
            "num_kv_shared_layers": 0,
            "sliding_window": 1024,
        },
    },
    "gemma-4-e2b": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_size": 1536,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "num_attention_heads": 8,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "sliding_window": 512,
        },
    },
    "glm-5.2": {
        "model_type": "glm_moe_dsa",
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_skip_topk_offset": 3,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "kv_lora_rank": 512,
        "num_attention_heads": 64,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    },
    "kimi-k3": {
        "model_type": "kimi_k3",
        "text_config": {
            "model_type": "kimi_linear",
            "head_dim": 74,
            "hidden_size": 7168,
            "kv_lora_rank": 512,
            "linear_attn_config": {
                "full_attn_layers": K3_FULL,
                "head_dim": 128,
                "kda_layers": [at for at in range(1, 94) if at not in K3_FULL],
                "num_heads": 96,
                "short_conv_kernel_size": 4,
            },
            "num_attention_heads": 96,
            "num_hidden_layers": 93,
            "num_key_value_heads": 96,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        "head_dim": 128,
        "hidden_size": 3072,
        "num_attention_heads": 48,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "rotary_dim": 64,
    },
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_size": 2048,
            "layer_types": DELTAS_THEN_FULL * 10,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "num_attention_heads": 16,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
        },
    },
}

# Bytes of a context as kvcache-simulator 0.1.3 computes them from its table of 14 September 2026:
# KV in 16 bits, index keys in 8 (MiniMax-M3's in 16), recurrent states in 32. Of DeepSeek-V4.1 and
# GLM-5.3-Flash it has fields and no formula.
CONTEXT_TOKENS = 131_072
KVCACHE_SIMULATOR = {
    "deepseek-v4-pro": 1_172_963_328,
    "deepseek-v4-flash": 819_331_072,
    "deepseek-v3.2": 10_234_101_760,
    "deepseek-v3": 9_210_691_584,
    "deepseek-r1": 9_210_691_584,
    "glm-5": 13_086_228_480,
    "glm-5.1": 13_086_228_480,
    "glm-5.2": 12_129_927_168,
    "glm-5.3": 12_129_927_168,
    "kimi-k3": 4_073_250_816,
    "kimi-k2.5": 9_210_691_584,
    "kimi-k2.6": 9_210_691_584,
    "kimi-k2.7-code": 9_210_691_584,
    "qwen3.8-2.4t-a95b": 12_935_323_648,
    "qwen3.8-27b": 8_743_878_656,
    "qwen3.6-27b": 8_743_878_656,
    "qwen3.6-35b-a3b": 2_748_743_680,
    "qwen3.5-397b-a17b": 4_218_593_280,
    "qwen3.5-122b-a10b": 3_374_874_624,
    "qwen3.5-35b-a3b": 2_748_743_680,
    "qwen3.5-27b": 8_743_878_656,
    "qwen3.5-9b": 4_346_478_592,
    "qwen3.5-4b": 4_346_478_592,
    "qwen3.5-2b": 1_630_150_656,
    "qwen3.5-0.8b": 1_630_150_656,
    "qwen3-235b-a22b": 25_232_932_864,
    "qwen3-32b": 34_359_738_368,
    "qwen3-30b-a3b": 12_884_901_888,
    "qwen3-14b": 21_474_836_480,
    "qwen3-8b": 19_327_352_832,
    "qwen3-4b": 19_327_352_832,
    "qwen3-1.7b": 15_032_385_536,
    "qwen3-0.6b": 15_032_385_536,
    "qwen2.5-72b": 42_949_672_960,
    "qwen2.5-32b": 34_359_738_368,
    "qwen2.5-14b": 25_769_803_776,
    "qwen2.5-7b": 7_516_192_768,
    "llama-3.1-8b": 17_179_869_184,
    "llama-3.1-70b": 42_949_672_960,
    "llama-3.3-70b": 42_949_672_960,
    "gemma-4-e2b": 811_597_824,
    "gemma-4-e4b": 2_168_455_168,
    "gemma-4-26b-a4b": 2_894_069_760,
    "gemma-4-31b": 11_576_279_040,
    "minimax-m2": 33_285_996_544,
    "minimax-m2.1": 33_285_996_544,
    "minimax-m2.5": 33_285_996_544,
    "minimax-m2.7": 33_285_996_544,
    "minimax-m3": 18_018_729_984,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_entry_is_what_the_published_configuration_says(name: str) -> None:
    published = architecture_of(ConfigFields(PUBLISHED[name], "a test"))
    assert find_model(name).layers == published.layers


@pytest.mark.parametrize("name", KVCACHE_SIMULATOR)
def test_context_is_as_large_as_another_calculator_says(name: str) -> None:
    """It leaves out the 4 bytes of scale that stand beside each index key of 128 FP8 elements."""
    model = find_model(name)
    keys = [cache for cache in model.attention if cache.fixed_bytes == 128 + 4]
    scales = 4 * sum(cache.held_rows(CONTEXT_TOKENS) for cache in keys)
    ours = Footprint(model, find_dtype("bf16")).context_bytes(CONTEXT_TOKENS)
    assert ours - scales == KVCACHE_SIMULATOR[name]


def test_every_entry_says_where_it_comes_from() -> None:
    assert all(known.source and known.family for known in MODELS.values())
