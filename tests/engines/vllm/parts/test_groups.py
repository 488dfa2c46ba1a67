"""Which blocks a continuation needs, against vLLM's own cache managers; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.vllm.cache_layout import cache_groups
from vllm_parts.specs import chunk, config, full, group, state, window

MANAGERS: dict[Rule, type[SingleTypeKVCacheManager]] = {
    Rule.PREFIX: FullAttentionManager,
    Rule.WINDOW: SlidingWindowManager,
    Rule.CHUNK: ChunkedLocalAttentionManager,
    Rule.STATE: MambaManager,
}


def first_of_vllm(rule: Rule, spec: KVCacheSpec, tokens: int) -> int:
    """The first block that vLLM keeps of a request of which `tokens` are computed."""
    manager = MANAGERS[rule](
        spec,
        block_pool=BlockPool(4, True, spec.block_size),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=spec.block_size,
    )
    return max(0, manager.get_num_skipped_tokens(tokens)) // spec.block_size


def only(spec: KVCacheSpec) -> CacheGroup:
    (found,) = cache_groups(config(spec))
    return found


def specs(rule: Rule, block_tokens: int, reach_tokens: int) -> KVCacheSpec:
    return {
        Rule.PREFIX: lambda: full(block_tokens),
        Rule.WINDOW: lambda: window(block_tokens, reach_tokens),
        Rule.CHUNK: lambda: chunk(block_tokens, reach_tokens),
        Rule.STATE: lambda: state(block_tokens),
    }[rule]()


@given(
    st.sampled_from(list(Rule)),
    st.sampled_from([1, 4, 16, 32, 160]),
    st.integers(1, 700),
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
)
def test_first_block_needed_is_the_first_that_vllm_keeps(
    rule: Rule, block_tokens: int, reach_tokens: int, lengths: list[int]
) -> None:
    spec = specs(rule, block_tokens, reach_tokens)
    found = only(spec)
    assert (found.rule, found.block_tokens) == (rule, block_tokens)
    for blocks in lengths:
        tokens = blocks * block_tokens
        assert found.first_needed(tokens) == first_of_vllm(rule, spec, tokens)


def test_window_that_keeps_more_than_it_attends_to_is_refused() -> None:
    with pytest.raises(kvw.UsageError, match="keeps more of a window"):
        cache_groups(config(window(16, 64, extra_retained_tokens=20)))


def test_groups_with_full_attention_come_first_and_keep_their_place_in_vllm() -> None:
    found = cache_groups(config(window(16, 64), full(32), state(160), full(16)))
    assert [one.index for one in found] == [1, 3, 0, 2]
    assert [one.chained for one in found] == [True, True, False, False]
    assert found[0].layer_names == ("layer.1",)


def test_blocks_hold_a_whole_number_of_hashes() -> None:
    found = cache_groups(config(full(32), window(16, 64), hash_tokens=16))
    assert [one.block_hashes for one in found] == [2, 1]
    assert {one.hash_tokens for one in found} == {16}
    assert only(full(32)).block_hashes == 1
    with pytest.raises(kvw.UsageError, match="blocks of 32 tokens and hashes of 24"):
        cache_groups(config(full(32), hash_tokens=24))


def test_layers_that_differ_in_size_are_one_group() -> None:
    spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full(16), "b": full(16)})
    found = only(spec)
    assert (found.rule, found.block_tokens) == (Rule.PREFIX, 16)


def test_latent_attention_is_full_attention() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=full(16).dtype)
    assert only(spec).rule is Rule.PREFIX


SIZES: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": full(16).dtype,
}
TIER = "WarehouseTier"


class KindOfALaterVersionSpec(FullAttentionSpec):
    """That it is like a known one says nothing about its blocks."""


def test_index_keys_beside_full_attention_are_one_group_with_it() -> None:
    both = {"a": full(16), "b": MLAAttentionSpec(**SIZES)}
    found = only(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=both))
    assert (found.rule, found.block_tokens) == (Rule.PREFIX, 16)


def unserved() -> dict[str, tuple[Any, tuple[str, ...]]]:
    mixed = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"a": full(16), "b": window(16, 64)}
    )
    page = {"block_size": 16, "page_size": 64}
    return {
        "latent attention with a window": (
            SlidingWindowMLASpec(sliding_window=64, **SIZES),
            ("SlidingWindowMLASpec", "latent", TIER),
        ),
        "a ring": (CircularBufferSpec(**SIZES), ("CircularBufferSpec", "written over", TIER)),
        "windows behind the prompt": (
            RSWASpec(rswa_window=64, **SIZES),
            ("RSWASpec", "ends with its prompt"),
        ),
        "hot rows of host memory": (
            HiSparseHotSpec(blocks_per_request=2, **page),
            ("HiSparseHotSpec", "host memory", TIER),
        ),
        "resident rows of host memory": (
            HiSparseResidentSpec(**page),
            ("HiSparseResidentSpec", "host memory", TIER),
        ),
        "attention to an encoder": (
            CrossAttentionSpec(**SIZES),
            ("CrossAttentionSpec", "encoder's input"),
        ),
        "an encoder": (EncoderOnlyAttentionSpec(**SIZES), ("EncoderOnlyAttentionSpec", "behind")),
        "hidden states": (
            HiddenStateCacheSpec(**SIZES),
            ("HiddenStateCacheSpec", "hidden states", TIER),
        ),
        "a kind of a later version": (
            KindOfALaterVersionSpec(**SIZES),
            ("KindOfALaterVersionSpec", "not known here", TIER),
        ),
        "two rules in one group": (
            mixed,
            ("FullAttentionSpec, SlidingWindowSpec", "several kinds", TIER),
        ),
        "states without checkpoints": (state(16, "none"), ("'none'",)),
        "states of every block": (state(16, "all"), ("'all'",)),
        "host memory": (group(full(16), host_resident=True), ("does not cache by prefix",)),
        "a replica": (group(full(16), enable_kv_transfer=False), ("does not cache by prefix",)),
    }


@pytest.mark.parametrize("name", unserved())
def test_group_that_cannot_be_served_is_refused_by_name(name: str) -> None:
    spec, words = unserved()[name]
    with pytest.raises(kvw.UsageError) as refused:
        cache_groups(config(full(16), spec))
    assert refused.value.code == "unsupported"
    for part in (*words, "cache group 1", "docs/vllm.md"):
        assert part in str(refused.value)


def test_every_kind_of_vllm_is_served_or_refused_with_a_reason() -> None:
    """A kind that a new version brings is refused as unknown; then it wants a line of its own."""
    served = {full(16), chunk(16, 64), window(16, 64), state(16)}
    known = {type(spec).__name__ for spec in served} | {"MLAAttentionSpec"}
    known |= {SinkFullAttentionSpec.__name__}
    refused = {type(spec).__name__ for spec, _ in unserved().values()}
    bases = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
    own = {
        kind.__name__
        for kind in all_kinds(KVCacheSpec)
        if kind.__module__ == KVCacheSpec.__module__
    }
    assert own - bases == known | (refused & own) - bases


def all_kinds(kind: type[KVCacheSpec]) -> set[type[KVCacheSpec]]:
    return {kind}.union(*(all_kinds(derived) for derived in kind.__subclasses__()))


def test_model_without_a_cache_is_refused() -> None:
    with pytest.raises(kvw.UsageError, match="no KV cache"):
        cache_groups(config())
