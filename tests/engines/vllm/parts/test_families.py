"""The table of model families in docs/vllm.md, against the cache groups that vLLM makes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

import kvwarehouse as kvw
from kvwarehouse_connectors.vllm.cache_layout import cache_groups
from vllm_parts.specs import chunk, config, full, state, window

DOC = Path(__file__).parents[4] / "docs" / "vllm.md"
SIZES: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": full(16).dtype,
}
LATENT = MLAAttentionSpec(**SIZES)
RING = CircularBufferSpec(**SIZES)
LATENT_WINDOW = SlidingWindowMLASpec(sliding_window=64, **SIZES)


def together(*specs: KVCacheSpec) -> KVCacheSpec:
    layers = {str(at): spec for at, spec in enumerate(specs)}
    found = UniformTypeKVCacheSpecs.from_specs(layers)
    assert found is not None, "vLLM makes several groups of it"
    return found


# By the first cell of a row.
GROUPS: dict[str, list[KVCacheSpec]] = {
    "Llama 2 and 3, Qwen2.5, Qwen3, GLM-4.5, MiniMax-M2, Ministral 3": [full(16)],
    "Mistral 7B v0.1": [window(16, 64)],
    "gpt-oss": [full(16), window(16, 64)],
    "Gemma 3": [full(16), window(16, 64), window(16, 64)],
    "Gemma 4": [full(16, heads=1), window(16, 64)],
    "Llama 4": [full(16), chunk(16, 96)],
    "DeepSeek-V2, V3, R1; Kimi-K2 to K2.7; Mistral Small 4": [LATENT],
    "DeepSeek-V3.2; GLM-5 to GLM-5.3": [together(LATENT, MLAAttentionSpec(**SIZES))],
    "MiniMax-M3": [together(full(16), LATENT)],
    "Qwen3-Next": [full(16), state(160)],
    "Qwen3.5 to Qwen3.8": [full(16), state(160)],
    "Kimi Linear, Kimi-K3": [LATENT, state(16)],
    "DeepSeek-V4": [LATENT, LATENT_WINDOW],
    "DeepSeek-V4.1, GLM-5.3-Flash, Qwen4-Exp": [LATENT, RING],
    "Unlimited-OCR": [RSWASpec(rswa_window=64, **SIZES)],
}


def rows() -> dict[str, list[str]]:
    section = DOC.read_text().partition("### Model families")[2].partition("\n#")[0]
    cells = [re.split(r" *\| *", line.strip("| \n")) for line in re.findall(r"\|.*\n", section)]
    return {each[0]: each for each in cells[2:]}


def test_table_has_a_row_for_each_family() -> None:
    assert list(rows()) == list(GROUPS)


@pytest.mark.parametrize("family", GROUPS)
def test_family_is_served_or_refused_as_its_row_says(family: str) -> None:
    said = rows()[family][2]
    if said.startswith("served"):
        assert cache_groups(config(*GROUPS[family], hash_tokens=16))
        return
    assert said.startswith("refused")
    with pytest.raises(kvw.UsageError) as refused:
        cache_groups(config(*GROUPS[family], hash_tokens=16))
    assert refused.value.code == "unsupported"
