"""Two ranks, of one stage or of two: each keeps its own part of every page, and a page is there
when both are."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from vllm_rig.bay import Bay
from vllm_rig.compare import assert_same
from vllm_rig.engine import Engine
from vllm_rig.kinds import DEEPSEEK3
from vllm_rig.messages import Ask
from vllm_rig.pair import Pair, blocks, hit, prompt
from vllm_rig.settle import settle
from vllm_rig.stock import copies, stock

Start = Callable[..., Pair]


TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(TENSOR, id="tensor"),
        pytest.param(PIPELINE, id="pipeline", marks=pytest.mark.slow_engine),
    ],
)
def ranks(request: pytest.FixtureRequest) -> dict[str, int]:
    """Options of an engine of two ranks; of a module, so that tests of the same engine follow each
    other."""
    options: dict[str, int] = request.param
    return options


@pytest.fixture
def pair(start: Start, rng: random.Random, ranks: dict[str, int]) -> Pair:
    pair = start(**ranks)
    pair.connected(rng)
    pair.engine.forget()
    return pair


def test_each_rank_stores_and_loads_its_own_part(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, 300))
    cold = pair.engine.ask(ask)
    settle(pair, rng)
    stored = stock(pair, ask.tokens)
    assert sorted((page.shard, page.block) for page in stored) == [
        (shard, block) for shard in (0, 1) for block in range(blocks(ask))
    ]
    by_name = {(page.shard, page.block): data for page, data in stored.items()}
    assert not any(np.array_equal(by_name[0, b], by_name[1, b]) for b in range(blocks(ask)))
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)
    assert_same(warm, pair.recomputed(ask))


def test_prompts_at_once_load_on_both_ranks(pair: Pair, rng: random.Random) -> None:
    shared = prompt(rng, 140)
    asks = [Ask(shared[: rng.randrange(140)] + prompt(rng, 200)) for _ in range(6)]
    pair.engine.generate(asks)
    settle(pair, rng)
    together = pair.engine.generate(asks)
    assert [answer.cached for answer in together] == [hit(ask) for ask in asks]
    for ask, answer in zip(asks, together, strict=True):
        assert_same(answer, pair.recomputed(ask))


@pytest.mark.slow_engine
@pytest.mark.parametrize("shard", [0, 1])
def test_damaged_part_of_one_rank_costs_computing_and_no_wrong_answer(
    pair: Pair, rng: random.Random, shard: int
) -> None:
    ask = Ask(prompt(rng, 300))
    cold = pair.engine.ask(ask)
    settle(pair, rng)
    before = stock(pair, ask.tokens)
    (part,) = (data for page, data in before.items() if (page.shard, page.block) == (shard, 4))
    for place in copies(pair, part):
        place.flip(3, at=100)
    failed = pair.engine.metrics()["kvwarehouse_connector_failed_loads_total"]
    computed = pair.reloaded(ask)  # vLLM goes on counting as cached what did not come
    assert pair.engine.metrics()["kvwarehouse_connector_failed_loads_total"] > failed
    assert_same(cold, computed)
    settle(pair, rng)
    after = stock(pair, ask.tokens)
    assert after.keys() == before.keys()
    for page, stored in after.items():
        # Block 4 was computed in a smaller batch this time, which adds in another order.
        assert np.allclose(stored.view(np.float32), before[page].view(np.float32), atol=1e-4), page
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)


def test_both_parts_outlive_a_daemon_that_is_killed(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, 300))
    cold = pair.engine.ask(ask)
    settle(pair, rng)
    pair.daemon.kill()
    alone = pair.reloaded(ask)  # from memory that is still mapped
    assert_same(cold, alone)
    pair.daemon.start()
    pair.connected(rng)
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)


@pytest.mark.slow_engine
def test_both_parts_outlive_the_engine(
    pair: Pair, bay: Bay, start: Start, rng: random.Random, ranks: dict[str, int]
) -> None:
    ask = Ask(prompt(rng, 300))
    cold = pair.engine.ask(ask)
    settle(pair, rng)
    bay.empty()
    warm = start(**ranks).engine.ask(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)


@pytest.mark.slow_engine
def test_two_ranks_answer_as_an_engine_without_a_connector(
    plain: Engine, start: Start, rng: random.Random, ranks: dict[str, int]
) -> None:
    asks = [Ask(prompt(rng, tokens)) for tokens in (40, 333, 700)]
    alone = plain.generate(asks)
    pair = start(**ranks)
    pair.connected(rng)
    cold = pair.engine.generate(asks)
    settle(pair, rng)
    warm = [pair.reloaded(ask) for ask in asks]
    assert [answer.cached for answer in warm] == [hit(ask) for ask in asks]
    for one, other, third in zip(alone, cold, warm, strict=True):
        assert_same(one, other)
        assert_same(other, third)


@pytest.mark.slow_engine
def test_one_rank_reads_nothing_of_two(pair: Pair, start: Start, rng: random.Random) -> None:
    """Its pages are others: twice the heads, or all layers."""
    ask = Ask(prompt(rng, 300))
    cold = pair.engine.ask(ask)
    settle(pair, rng)
    alone = start()
    alone.connected(rng)
    answer = alone.reloaded(ask)
    assert answer.cached == 0
    assert_same(cold, answer)


@pytest.mark.slow_engine
def test_what_both_ranks_hold_is_stored_once(start_model: Start, rng: random.Random) -> None:
    """The latents of DeepSeek's attention are the same on all ranks."""
    pair = start_model(DEEPSEEK3.shape, **DEEPSEEK3.options, tensor_parallel_size=2)
    ask = Ask(prompt(rng, 300))
    pair.engine.ask(ask)
    settle(pair, rng)
    assert sorted((page.shard, page.block) for page in stock(pair, ask.tokens)) == [
        (0, block) for block in range(len(ask.tokens) // DEEPSEEK3.block)
    ]
    assert pair.reloaded(ask).cached == DEEPSEEK3.blocks_of(len(ask.tokens))
