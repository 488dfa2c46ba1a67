"""Pipeline stages: each has layers of its own, and its part of every page."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.cache_layout import cache_groups
from vllm_parts.halves import Engine, engine_config, same
from vllm_parts.prompts import one_group, one_layer, second_stage, stored_prompt
from vllm_parts.requests import request, tokens
from vllm_parts.specs import config, full, group


def elsewhere() -> list[Any]:
    return [group(full(16), "e", "f")]


def test_stages_store_and_load_each_its_own_part(shared: Serving, rng: random.Random) -> None:
    with (
        Engine(shared.address, one_group, later_stages=[second_stage]) as engine,
        Engine(shared.address, one_group, later_stages=[second_stage]) as another,
    ):
        ids, content = stored_prompt(engine, rng)
        assert not same(content[:1], content[1:])
        blocks = list(range(30, 40))
        assert another.load(request([*ids, 7]), [blocks]) == 160
        assert same(another.pages(blocks), content)


def test_page_is_not_promised_before_every_stage_has_stored_it(
    shared: Serving, rng: random.Random
) -> None:
    with Engine(shared.address, one_group, later_stages=[second_stage]) as engine:
        ids = tokens(rng, 160)
        engine.fill(range(1, 11))
        one = request(ids)
        engine.scheduler.on_new_request(one)
        engine.workers[1]._stores = False
        engine.compute(one, [list(range(1, 11))], 160)
        eventually(lambda: engine.workers[0].stats(), "the first stage has stored")
        assert engine.promised(request([*ids, 7])) == 0


@pytest.mark.parametrize("others", [(), (elsewhere,), (second_stage, elsewhere)])
def test_other_splits_of_the_layers_share_nothing(others: Any, shared: Serving) -> None:
    with (
        Engine(shared.address, one_group, later_stages=[second_stage]) as engine,
        Engine(shared.address, one_group, later_stages=others) as other,
    ):
        assert not {s.id for s in engine.scheduler._spaces} & {
            s.id for s in other.scheduler._spaces
        }


def test_stages_of_unequal_size_are_refused_in_words(shared: Serving) -> None:
    unequal = Engine(shared.address, one_group, later_stages=[one_layer])
    with pytest.raises(kvw.UsageError, match="VLLM_PP_LAYER_PARTITION"), unequal:
        pass
    for worker in unequal.workers:
        worker.close()


def test_stage_without_layers_of_a_group_is_refused_in_words() -> None:
    empty = config(full(16), hash_tokens=16)
    empty.kv_cache_groups[0].layer_names.clear()
    with pytest.raises(kvw.UsageError, match="stage without layers of group 0"):
        cache_groups(empty)


@pytest.mark.parametrize(
    ("stages", "ranks", "replicas", "found"),
    [
        (1, 2, 1, [(0, True), (1, True)]),
        (2, 1, 1, [(0, True), (1, True)]),
        (2, 2, 1, [(0, True), (1, True), (2, True), (3, True)]),
        (2, 2, 2, [(0, True), (0, False), (1, True), (1, False)]),
        (2, 4, 2, [(0, True), (0, False), (1, True), (1, False), (2, True), (2, False)]),
    ],
)
def test_each_worker_has_its_part_by_stage_and_rank(
    stages: int, ranks: int, replicas: int, found: list[tuple[int, bool]]
) -> None:
    cache = SimpleNamespace(kv_tp_replicas=replicas)
    engines = [engine_config([], rank=n, ranks=ranks, stages=stages) for n in range(len(found))]
    assert [compat.shard(engine, cache) for engine in engines] == found
    assert compat.shards(engines[0], cache) == stages * ranks // replicas


def test_second_replica_of_an_engine_has_the_parts_of_the_first() -> None:
    """vLLM may number ranks over all replicas of data parallelism."""
    cache = SimpleNamespace(kv_tp_replicas=1)
    assert [
        compat.shard(engine_config([], rank=rank, ranks=2, stages=2), cache)[0] for rank in range(8)
    ] == [0, 1, 2, 3] * 2
