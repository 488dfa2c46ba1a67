"""From config.json fields to layers, and from layers to bytes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwarehouse.errors import UsageError
from kvwarehouse.model.architecture import Architecture, Attention, StateSpace, uniform
from kvwarehouse.model.catalogue import MODELS, find_model
from kvwarehouse.model.config import ConfigFields, architecture_of, read_config
from kvwarehouse.model.footprint import Footprint, Sharding, find_dtype

FP16 = find_dtype("fp16")
BASE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
PER_LAYER = 2 * 2 * 64 * 2


def read(**fields: Any) -> Architecture:
    return architecture_of(ConfigFields({**BASE, **fields}, "a test"))


def spans(model: Architecture) -> list[int]:
    return [layer.span_tokens for layer in model.attention]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", "llama-4-maverick"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "qwen2.5-1.5b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("llama3.3-70b", "llama-3.3-70b"),
        ("deepseek-ai/DeepSeek-V4-Pro-0813", "deepseek-v4-pro"),
        ("zai-org/GLM-5.2", "glm-5.2"),
        ("google/gemma-4-26B-A4B-it", "gemma-4-26b-a4b"),
        ("mistralai/Mistral-Small-4-119B-2603", "mistral-small-4-119b"),
    ],
)
def test_model_is_found_however_its_name_is_written(written: str, name: str) -> None:
    assert find_model(written).name == name


@pytest.mark.parametrize("name", MODELS)
def test_every_known_model_has_a_footprint(name: str) -> None:
    model = find_model(name)
    footprint = Footprint(model, FP16)
    assert footprint.context_bytes(100_000) <= (
        footprint.bytes_per_token * 100_000 + footprint.state_bytes
    )
    assert footprint.bytes_per_token + footprint.state_bytes > 0
    assert 0 <= model.active_params <= model.params


def test_missing_kv_heads_mean_one_for_each_head() -> None:
    model = architecture_of(
        ConfigFields({"n_layer": 12, "n_head": 12, "n_embd": 768, "model_type": "gpt2"}, "a test")
    )
    assert Footprint(model, FP16).bytes_per_token == 12 * 2 * 768 * 2


def test_multi_query_has_one_head() -> None:
    assert read(num_key_value_heads=None, multi_query=True).attention[0].kv_heads == 1


def test_language_part_of_a_larger_model_is_read_from_its_section() -> None:
    fields = ConfigFields({"vision_config": {}, "text_config": BASE}, "a test")
    assert len(architecture_of(fields).layers) == 4


def test_named_layer_types_are_believed() -> None:
    model = read(
        layer_types=["full_attention", "sliding_attention", "chunked_attention", "mamba"],
        sliding_window=512,
        attention_chunk_size=4096,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
    )
    assert spans(model) == [0, 512, 4096]
    assert [layer.span for layer in model.attention] == ["full", "window", "chunk"]
    assert len(model.state) == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sliding_window": 100}, [100] * 4),
        ({"sliding_window": None}, [0] * 4),
        ({"sliding_window": 100, "use_sliding_window": False}, [0] * 4),
        ({"sliding_window": 100, "max_window_layers": 3}, [0, 0, 0, 100]),
        ({"sliding_window": 100, "sliding_window_pattern": 2}, [100, 0, 100, 0]),
        ({"sliding_window": 100, "model_type": "gemma2"}, [100, 0, 100, 0]),
        ({"attention_chunk_size": 100}, [100, 100, 100, 0]),
        ({"attention_chunk_size": 100, "no_rope_layers": [0, 1, 0, 1]}, [0, 100, 0, 100]),
    ],
)
def test_windows_stand_where_the_family_puts_them(
    fields: dict[str, Any], expected: list[int]
) -> None:
    assert spans(read(**fields)) == expected


def test_window_holds_its_span_and_full_layers_everything() -> None:
    footprint = Footprint(read(sliding_window=100, sliding_window_pattern=2), FP16)
    assert footprint.bytes_per_token == 4 * PER_LAYER
    assert footprint.growing_bytes_per_token == 2 * PER_LAYER
    assert footprint.context_bytes(1000) == 2 * PER_LAYER * (1000 + 100)


def test_layers_that_share_keep_nothing() -> None:
    model = read(num_kv_shared_layers=3)
    assert Footprint(model, FP16).bytes_per_token == PER_LAYER
    with pytest.raises(UsageError, match="num_kv_shared_layers"):
        read(num_kv_shared_layers=4)


def test_numbered_attention_types_are_believed() -> None:
    # MiniMax-Text-01: its linear layers counted as full attention, 327,680 bytes a token.
    every_eighth = [0, 0, 0, 0, 0, 0, 0, 1] * 10
    shape = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    model = read(**shape, head_dim=128, hidden_size=6144, attn_type_list=every_eighth)
    footprint = Footprint(model, FP16)
    assert footprint.bytes_per_token == 10 * 8 * 2 * 128 * 2 == 40_960
    assert model.state == (StateSpace(64 * 128 * 128, 0, 64),) * 70
    for wrong in (every_eighth[1:], [2] * 80):
        with pytest.raises(UsageError, match="attn_type_list"):
            read(**shape, head_dim=128, hidden_size=6144, attn_type_list=wrong)


def nemotron_block(**attention: Any) -> dict[str, Any]:
    left = {"no_op": False, "replace_with_linear": False, "window_length": None, "sparsify": None}
    return {"attention": {"n_heads_in_group": None, **left, **attention}, "ffn": {"no_op": True}}


def test_blocks_of_their_own_kv_heads_are_believed() -> None:
    # Llama-3.3-Nemotron-Super-49B: 49 of 80 layers have attention, of 8 KV heads. All 64 heads of
    # all layers were counted, 2,621,440 bytes a token.
    blocks = [nemotron_block(n_heads_in_group=8)] * 49 + [nemotron_block(no_op=True)] * 20
    blocks += [nemotron_block(replace_with_linear=True)] * 11
    shape = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": None}
    model = read(**shape, head_dim=None, hidden_size=8192, block_configs=blocks)
    assert Footprint(model, FP16).bytes_per_token == 49 * 8 * 2 * 128 * 2 == 200_704
    assert len(model.layers) == 80


@pytest.mark.parametrize(
    "blocks",
    [
        [nemotron_block(n_heads_in_group=2)] * 3,
        [nemotron_block(n_heads_in_group=3)] * 4,
        [nemotron_block()] * 4,
        [nemotron_block(n_heads_in_group=2, window_length=512)] * 4,
        [{"ffn": {}}] * 4,
        [1] * 4,
    ],
)
def test_blocks_that_are_not_understood_are_refused(blocks: Any) -> None:
    with pytest.raises(UsageError, match=r"block_configs|n_heads_in_group"):
        read(block_configs=blocks)


# Falcon-H1-7B, as published: attention and Mamba-2 side by side in each of 44 layers.
FALCON_H1 = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 44,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_size": 3072,
    "attn_layer_indices": None,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
}


def test_layers_of_attention_and_a_state_keep_both() -> None:
    # Their states were left out without a word.
    model = architecture_of(ConfigFields(FALCON_H1, "a test"))
    assert model.kinds == {"hybrid": 44}
    assert model.state == (StateSpace(24 * 128 * 256, (3072 + 2 * 256) * 3, 24),) * 44
    footprint = Footprint(model, FP16)
    assert footprint.bytes_per_token == 44 * 2 * 2 * 128 * 2
    assert footprint.all_ranks_bytes_per_token(Sharding(2)) == footprint.bytes_per_token
    assert footprint.context_bytes(0) == footprint.state_bytes > 0
    named = read(layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=16, hidden_size=512)
    assert (len(named.attention), len(named.state)) == (2, 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_attention_groups": 1},
        {"num_key_value_heads_per_layer": [4, 4, 2, 2]},
        {"cross_attention_layers": [1, 3]},
        {"layer_group_size": 4},
        {"mamba_d_state": 16, "mamba_expand": 2},
        {"layer_types": ["linear_attention"] * 4, "hidden_size": 512},
    ],
)
def test_what_is_said_of_layers_and_not_read_is_refused(fields: dict[str, Any]) -> None:
    # Each was taken for full attention in every layer, without a word.
    with pytest.raises(UsageError) as refused:
        read(**fields)
    assert refused.value.code == "unsupported_model"


def test_fields_of_no_layer_that_is_named_are_left_alone() -> None:
    # Granite 4.0 without states has the fields of Granite 4.0 with them.
    model = read(layer_types=["attention"] * 4, mamba_n_heads=128, mamba_d_state=256)
    assert model.kinds == {"full": 4}
    assert read(cross_attention_layers=[], attn_type_list=[1] * 4).kinds == {"full": 4}


def test_pattern_of_letters_says_every_layer() -> None:
    state = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
    model = read(hybrid_override_pattern="M-*E", **state)
    assert (len(model.layers), len(model.attention), len(model.state)) == (4, 1, 1)
    # State: heads x dimension x state. Convolution: (inner + 2 x groups x state) x (width - 1).
    assert model.state[0] == StateSpace(4 * 16 * 8, (64 + 2 * 2 * 8) * 3, 4)


def test_linear_attention_keeps_a_matrix_for_each_value_head() -> None:
    model = find_model("qwen3-next-80b-a3b")
    assert (len(model.attention), len(model.state)) == (12, 36)
    assert model.state[0] == StateSpace(32 * 128 * 128, (2 * 16 * 128 + 32 * 128) * 3, 32)


def test_pure_state_model_has_the_same_size_at_any_length() -> None:
    footprint = Footprint(find_model("mamba-2.8b"), FP16)
    assert footprint.bytes_per_token == 0
    assert footprint.context_bytes(1) == footprint.context_bytes(10**6)
    assert footprint.state_bytes == 64 * 5120 * (16 * 4 + 3 * 2)


def test_sparse_mla_adds_its_index_keys_whatever_the_dtype() -> None:
    model = find_model("deepseek-v3.2")
    for name, bytes_each in (("fp16", 2), ("fp8", 1)):
        assert Footprint(model, find_dtype(name)).bytes_per_token == 61 * (576 * bytes_each + 132)


@pytest.mark.parametrize(
    ("fields", "indexed"),
    [
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [True, False, True, False]),
        ({"index_topk_pattern": "FSSF"}, [True, False, False, True]),
        ({"indexer_types": ["full", "shared", "shared", "shared"]}, [True, False, False, False]),
        ({}, [True] * 4),
    ],
)
def test_layers_that_share_an_index_keep_no_keys_of_it(
    fields: dict[str, Any], indexed: list[bool]
) -> None:
    model = read(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128, **fields)
    assert [layer.fixed_bytes for layer in model.attention] == [132 * each for each in indexed]


def test_index_keys_of_pools_and_of_other_families() -> None:
    pooled = read(kv_lora_rank=512, index_head_dim=128, index_kpool=4)
    assert pooled.attention[0].fixed_bytes == 33
    grouped = read(indexer_head_dim=128, indexer_compress_ratio=16)
    assert grouped.attention[0].fixed_bytes == 128 * 2 // 16
    sparse = {"sparse_index_dim": 128, "sparse_attention_freq": [0, 1, 1, 1]}
    some = read(sparse_attention_config=sparse)
    assert [layer.fixed_bytes for layer in some.attention] == [0, 256, 256, 256]


def test_windows_keep_no_index_keys() -> None:
    model = read(index_head_dim=128, sliding_window=100, sliding_window_pattern=2)
    assert [layer.fixed_bytes for layer in model.attention] == [0, 132, 0, 132]


def test_compressed_layers_keep_a_row_for_several_tokens_and_a_window() -> None:
    model = read(compress_ratios=[0, 4, 128, 4, 0], sliding_window=128, index_head_dim=128)
    assert model.kinds == {"window": 1, "compressed": 3}
    footprint = Footprint(model, FP16)
    row, index = 64 * 2, 132
    assert footprint.growing_bytes_per_token == 2 * (row + index) // 4 + row // 128
    assert footprint.bytes_per_token == footprint.growing_bytes_per_token + 4 * row
    assert footprint.context_bytes(1000) == (4 * 128 * row + 2 * 250 * (row + index) + 7 * row), (
        "the row of tokens that are not yet enough for one is not there"
    )
    assert footprint.rank_bytes_per_token(Sharding(tp=8)) == footprint.bytes_per_token


def test_layers_that_read_compressed_rows_of_another_keep_a_window_only() -> None:
    model = read(
        compress_ratios=[0, 2, 2, 1],
        kv_source_layer_ids=[1, 3],
        sliding_window=128,
        index_head_dim=128,
    )
    assert model.kinds == {"window": 2, "compressed": 1, "latent": 1}
    rows = [layer.fixed_bytes for layer in model.attention if layer.span == "full"]
    assert rows == [132, 132]


def test_full_layers_may_have_heads_of_their_own() -> None:
    model = read(
        global_head_dim=128,
        num_global_key_value_heads=1,
        sliding_window=100,
        sliding_window_pattern=4,
    )
    assert [(layer.kv_heads, layer.key_dim) for layer in model.attention] == [(2, 64)] * 3 + [
        (1, 128)
    ]


def test_kimi_delta_layers_stand_where_the_list_leaves_them() -> None:
    linear = {"full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 16}
    model = read(linear_attn_config=linear, kv_lora_rank=512)
    assert model.kinds == {"state": 2, "latent": 2}
    assert isinstance(model.layers[0], StateSpace)
    assert model.state[0] == StateSpace(4 * 16 * 16, 3 * 4 * 16 * 3, 4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "8 attention heads over 3 KV heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": None, "hidden_size": 100}, "no multiple of 8"),
        ({"layer_types": ["full_attention"]}, "one name for each of 4"),
        ({"layer_types": ["odd"] * 4}, "'odd'"),
        ({"hybrid_override_pattern": "M?"}, "hybrid_override_pattern"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"sliding_window": -5}, "sliding_window"),
        ({"text_config": 7}, "text_config"),
        ({"compress_ratios": [4, 4], "sliding_window": 128}, "compress_ratios"),
        ({"compress_ratios": [4, 4, 4, -4], "sliding_window": 128}, "compress_ratios"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(**fields)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00", '{"num_hidden_layers": 3}'])
def test_file_that_is_no_model_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        architecture_of(read_config(tmp_path))


@given(
    st.dictionaries(
        st.sampled_from([*BASE, "layer_types", "sliding_window", "kv_lora_rank", "text_config"]),
        st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3) | st.lists(st.text()),
    )
)
def test_fields_of_any_kind_are_read_or_refused(fields: dict[str, Any]) -> None:
    decoded = json.loads(json.dumps({**BASE, **fields}))
    with suppress(UsageError):
        architecture_of(ConfigFields(decoded, "a test"))


# --- number formats -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [("fp32", 512), ("fp16", 256), ("bf16", 256), ("fp8", 128), ("int8", 132), ("int4", 72)],
)
def test_row_of_128_elements_has_the_bytes_of_its_format(name: str, row_bytes: int) -> None:
    assert find_dtype(name).row_bytes(128) == row_bytes


def test_scales_can_be_given() -> None:
    assert find_dtype("int4", scale_group=128, scale_bytes=4).row_bytes(128) == 64 + 4
    assert find_dtype("int8", scale_group=0).row_bytes(128) == 128
    assert find_dtype("int4").row_bytes(33) == 17 + 2 * 2
    with pytest.raises(UsageError, match="scale"):
        find_dtype("int4", scale_group=32, scale_bytes=0)


# --- shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "pp", "rank", "together"),
    [(1, 1, 80, 80), (8, 1, 10, 80), (16, 1, 10, 160), (1, 3, 27, 80), (2, 80, 0.5, 80)],
)
def test_ranks_split_heads_and_layers_and_repeat_scarce_heads(
    tp: int, pp: int, rank: float, together: float
) -> None:
    footprint = Footprint(uniform(80, 8, 128), FP16)
    layer = 8 * 128 * 4
    assert footprint.rank_bytes_per_token(Sharding(tp, pp)) == rank * layer
    assert footprint.all_ranks_bytes_per_token(Sharding(tp, pp)) == together * layer


def test_latent_rows_stand_on_every_tensor_parallel_rank() -> None:
    footprint = Footprint(find_model("deepseek-v3"), FP16)
    assert footprint.rank_bytes_per_token(Sharding(tp=8)) == 70_272


def test_fullest_stage_counts_where_layers_differ() -> None:
    layers = (Attention(1, 64, 64),) * 3 + (StateSpace(10, 0),) * 3
    footprint = Footprint(Architecture("mixed", layers), FP16)
    assert footprint.rank_bytes_per_token(Sharding(pp=2)) == footprint.bytes_per_token
