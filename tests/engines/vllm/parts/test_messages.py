"""What the halves tell each other survives pickling, and results of ranks become one."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from hypothesis import given
from hypothesis import strategies as st

import kvwarehouse as kvw
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.vllm.messages import (
    CacheInfo,
    GroupInfo,
    LoadOrder,
    StepMetadata,
    StepResults,
)

KEYS = [bytes([number]) * 32 for number in range(6)]

step_results = st.builds(
    StepResults,
    failed=st.sets(st.sampled_from(["a", "b", "c"])),
    load_bytes_per_s=st.sampled_from([0.0, 1e9, 5e9]),
    nvme_bytes_per_s=st.sampled_from([0.0, 1e8, 2e9]),
    stored=st.dictionaries(
        st.tuples(st.integers(0, 1), st.sampled_from(KEYS)), st.integers(1, 3), max_size=4
    ).map(Counter),
)


@given(st.lists(step_results, min_size=1, max_size=4))
def test_outcomes_of_all_ranks_are_every_failure_the_slowest_rate_and_all_stores(
    ranks: list[StepResults],
) -> None:
    together = ranks[0]
    for rank in ranks[1:]:
        together = together.aggregate(rank)
    assert together.failed == set().union(*(rank.failed for rank in ranks))
    for name in ("load_bytes_per_s", "nvme_bytes_per_s"):
        told = [getattr(rank, name) for rank in ranks if getattr(rank, name)]
        assert getattr(together, name) == (min(told) if told else 0.0)
    for key in {key for rank in ranks for key in rank.stored}:
        assert together.stored[key] == sum(rank.stored[key] for rank in ranks)
    assert bool(together) == any(bool(rank) for rank in ranks)


def test_nothing_to_tell_is_false() -> None:
    assert not StepResults()
    assert StepResults(failed={"a"})


@given(step_results)
def test_step_results_survive_pickling(one: StepResults) -> None:
    assert pickle.loads(pickle.dumps(one)) == one


def test_orders_and_facts_survive_pickling() -> None:
    space = kvw.Namespace(
        model="m", weights="w", dtype="float16", layout="vllm/1", page_tokens=16, page_bytes=64
    )
    run = PageRun(0, KEYS, [3, 1, 2, 6, 5, 4], True, 2, b"p" * 32)
    metadata = StepMetadata(
        spaces=(space,), loads=[LoadOrder("r", (run,), 0.5, True)], stores=[run]
    )
    assert pickle.loads(pickle.dumps(metadata)) == metadata
    assert pickle.loads(pickle.dumps(metadata)).spaces[0].id == space.id
    cache_info = CacheInfo((GroupInfo(64, "l", "float16/auto", "CPU_ATTN"),), "cpu", 1 << 20)
    assert pickle.loads(pickle.dumps(cache_info)) == cache_info
    assert len({cache_info, pickle.loads(pickle.dumps(cache_info))}) == 1


@given(st.integers(0, 6), st.integers(0, 100))
def test_rest_of_a_chained_run_follows_from_the_key_before_it(begin: int, position: int) -> None:
    parent = b"p" * 32 if position else None
    run = PageRun(0, KEYS, list(range(6)), True, position, parent)
    (rest,) = run.key_runs(begin)
    assert list(rest.keys) == KEYS[begin:]
    assert rest.position == position + begin
    assert rest.parent == (KEYS[begin - 1] if begin else parent)


@given(st.integers(0, 6))
def test_blocks_that_stand_alone_have_no_parents(begin: int) -> None:
    run = PageRun(0, KEYS, list(range(6)), False)
    parts = run.key_runs(begin)
    assert [list(part.keys) for part in parts] == [[key] for key in KEYS[begin:]]
    assert all(part.position == 0 and part.parent is None for part in parts)
