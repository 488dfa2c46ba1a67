"""What holds for every kind of model, whatever its cache groups are: what is loaded is what would
be computed, and it is all that was stored."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from vllm_rig.bay import Bay
from vllm_rig.compare import assert_same
from vllm_rig.kinds import GEMMA3, GPT_OSS, MISTRAL, QWEN3_NEXT, Kind
from vllm_rig.messages import Ask
from vllm_rig.pair import Pair, prompt
from vllm_rig.settle import settle

Start = Callable[..., Pair]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(GPT_OSS, id="gpt-oss"),
        pytest.param(GEMMA3, id="gemma3", marks=pytest.mark.slow_engine),
        pytest.param(MISTRAL, id="mistral", marks=pytest.mark.slow_engine),
        pytest.param(QWEN3_NEXT, id="qwen3-next", marks=pytest.mark.slow_engine),
    ],
)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def pair(start_model: Start, kind: Kind) -> Pair:
    return start_model(kind.shape, **kind.options)


@pytest.mark.parametrize("tokens", [64, 161, 333, 1285])
def test_prompt_is_loaded_whole_whatever_its_length(
    pair: Pair, kind: Kind, rng: random.Random, tokens: int
) -> None:
    ask = Ask(prompt(rng, tokens))
    cold = pair.engine.ask(ask)
    assert cold.cached == 0
    settle(pair, rng, kind.block)
    warm = pair.reloaded(ask)
    assert warm.cached == kind.hit(tokens)
    assert_same(cold, warm, kind.tolerance)
    assert_same(warm, pair.recomputed(ask), kind.tolerance)


def test_prompt_loads_what_it_shares_with_another_one(
    pair: Pair, kind: Kind, rng: random.Random
) -> None:
    first = prompt(rng, 700)
    pair.engine.ask(Ask(first))
    settle(pair, rng, kind.block)
    other = Ask(first[:500] + prompt(rng, 100))
    answer = pair.reloaded(other)
    assert answer.cached == 500 // kind.checkpoint * kind.checkpoint
    assert_same(answer, pair.recomputed(other), kind.tolerance)


def test_prompt_loads_what_lies_behind_a_hit_in_vllms_own_cache(
    pair: Pair, kind: Kind, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, 700))
    pair.engine.ask(ask)
    settle(pair, rng, kind.block)
    head = Ask(ask.tokens[: 2 * kind.block + 1])
    pair.engine.ask(head)
    assert pair.engine.ask(head).cached == 2 * kind.block
    warm = pair.engine.ask(ask)
    assert warm.cached == kind.hit(700)
    assert_same(warm, pair.recomputed(ask), kind.tolerance)


def test_each_turn_of_a_conversation_loads_all_that_was_said(
    pair: Pair, kind: Kind, rng: random.Random
) -> None:
    said, known = prompt(rng, 5 * kind.block - 10), 0
    for _ in range(4):
        ask = Ask(said, max_tokens=40)
        answer = pair.reloaded(ask)
        assert answer.cached == known
        assert_same(answer, pair.recomputed(ask), kind.tolerance)
        settle(pair, rng, kind.block)
        known = kind.blocks_of(len(said) + 40 - 1)  # the last token was not computed yet
        said = said + answer.tokens + prompt(rng, 20)


def test_prompts_at_once_get_what_each_of_them_gets_alone(
    pair: Pair, kind: Kind, rng: random.Random
) -> None:
    shared = prompt(rng, 140)
    asks = [Ask(shared[: rng.randrange(140)] + prompt(rng, 200)) for _ in range(6)]
    pair.engine.generate(asks)
    settle(pair, rng, kind.block)
    together = pair.engine.generate(asks)
    assert [answer.cached for answer in together] == [kind.hit(len(ask.tokens)) for ask in asks]
    for ask, answer in zip(asks, together, strict=True):
        assert_same(answer, pair.recomputed(ask), kind.tolerance)


@pytest.mark.slow_engine
def test_what_is_stored_outlives_the_engine(
    pair: Pair, bay: Bay, start_model: Start, kind: Kind, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, 333))
    cold = pair.engine.ask(ask)
    settle(pair, rng, kind.block)
    bay.empty()
    warm = start_model(kind.shape, **kind.options).engine.ask(ask)
    assert warm.cached == kind.hit(333)
    assert_same(cold, warm, kind.tolerance)
