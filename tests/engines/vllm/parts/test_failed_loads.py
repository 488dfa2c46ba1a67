"""Blocks that did not come: which are reported, and what is not loaded after them."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core.page_run import PageRun
from vllm_parts.halves import Engine, same
from vllm_parts.prompts import one_group, one_window, second_stage, stored_prompt, two_groups
from vllm_parts.requests import request, tokens


def cut_loads(engine: Engine, pages: int, *, worker: int = 0) -> None:
    """From now on a load of that worker brings so many blocks and no more."""
    for memory in engine.workers[worker]._memories:
        real = memory.load

        def cut(space: Any, run: PageRun, begin: int, shard: int, timeout_s: float, real=real):  # type: ignore[no-untyped-def]
            loaded = min(int(real(space, run, begin, shard, timeout_s)), pages)
            return kvw.Loaded(loaded, {"absent": len(run.blocks) - begin - loaded})

        memory.load = cut  # type: ignore[method-assign]


def test_blocks_that_did_not_come_are_reported_and_those_before_them_are_kept(
    engine: Engine, rng: random.Random
) -> None:
    ids, content = stored_prompt(engine, rng)
    cut_loads(engine, 4)
    blocks = list(range(30, 40))
    one = request([*ids, 7], name="second")
    assert engine.load(one, [blocks]) == 160
    assert engine.bad_blocks == set(blocks[4:])
    assert engine.failed == set()
    assert same(engine.pages(blocks[:4]), [pages[:4] for pages in content])


def test_block_of_which_one_stage_found_nothing_is_computed_by_all(
    shared: Serving, rng: random.Random
) -> None:
    with Engine(shared.address, one_group, later_stages=[second_stage]) as engine:
        ids, content = stored_prompt(engine, rng)
        cut_loads(engine, 4, worker=1)
        blocks = list(range(30, 40))
        one = request([*ids, 7], name="second")
        assert engine.load(one, [blocks]) == 160
        assert engine.bad_blocks == set(blocks[4:])
        assert same(engine.pages(blocks[:4]), [pages[:4] for pages in content])
        assert engine.scheduler.matched(one, 0) == (0, False)


def test_request_whose_load_failed_loads_nothing_more_and_others_do(
    engine: Engine, rng: random.Random
) -> None:
    """It may not ask again and again for what does not come."""
    ids, _ = stored_prompt(engine, rng)
    cut_loads(engine, 0)
    one = request([*ids, 7], name="second")
    engine.load(one, [list(range(30, 40))])
    assert engine.scheduler.matched(one, 0) == (0, False)
    assert engine.promised(request([*ids, 7], name="third")) == 160


def test_request_of_several_groups_fails_as_a_whole(shared: Serving, rng: random.Random) -> None:
    """Block ids say nothing where groups have tables of their own; vLLM ends on them."""
    with Engine(shared.address, two_groups) as engine:
        ids = tokens(rng, 160)
        first = request(ids, name="first")
        engine.scheduler.on_new_request(first)
        engine.compute(first, [list(range(1, 11)), list(range(11, 21))], 160)
        engine.stored(request([*ids, 1], name="asks"), 160)
        cut_loads(engine, 1)
        tables = [list(range(30, 40)), [0] * 7 + [40, 41, 42]]
        engine.load(request([*ids, 7], name="second"), tables)
        assert engine.failed == {"second"}
        assert engine.bad_blocks == set()


def test_window_of_which_a_block_did_not_come_fails_as_a_whole(
    shared: Serving, rng: random.Random
) -> None:
    """vLLM cuts the computed tokens at the first bad block and computes on from there. In front of
    it a window has blocks that were never loaded: the answer would be a wrong one."""
    with Engine(shared.address, one_window) as engine:
        ids = tokens(rng, 160)
        first = request(ids, name="first")
        engine.scheduler.on_new_request(first)
        engine.compute(first, [list(range(1, 11))], 160)
        engine.stored(request([*ids, 1], name="asks"), 160)
        cut_loads(engine, 2)
        engine.load(request([*ids, 7], name="second"), [[0] * 6 + [40, 41, 42, 43]])
        assert engine.failed == {"second"}
        assert engine.bad_blocks == set()


def test_load_of_evicted_pages_is_reported(serving: Serving, rng: random.Random) -> None:
    with Engine(serving.address, one_group) as engine, serving.connect() as client:
        ids, _ = stored_prompt(engine, rng)
        one = request([*ids, 7], name="second")
        engine.scheduler.on_new_request(one)
        promised, _ = engine.scheduler.matched(one, 0)
        assert promised == 160
        client.clear(all=True)
        blocks = list(range(30, 40))
        engine.scheduler.allocated(one, [blocks], 160)
        engine.ended(one)
        assert engine.bad_blocks == set(blocks)


@pytest.mark.parametrize("asked", [0, 32, 160])
def test_load_that_was_never_found_is_refused_for_the_engine_waits_for_it(
    asked: int, engine: Engine, rng: random.Random
) -> None:
    one = request(tokens(rng, 161), name="second")
    engine.scheduler.on_new_request(one)
    blocks = list(range(30, 40))
    engine.scheduler.allocated(one, [blocks], asked)
    if asked:
        engine.ended(one)
    assert engine.failed == ({"second"} if asked else set())


def test_whatever_a_loading_thread_meets_is_reported(engine: Engine, rng: random.Random) -> None:
    ids, _ = stored_prompt(engine, rng)

    def fail(*arguments: Any) -> kvw.Loaded:
        raise RuntimeError("odd")

    engine.workers[0]._memories[0].load = fail  # type: ignore[method-assign]
    blocks = list(range(30, 40))
    engine.load(request([*ids, 7], name="second"), [blocks])
    assert engine.bad_blocks == set(blocks)
