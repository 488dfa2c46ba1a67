"""An engine with 24 blocks and 64 tokens a step: prompts come in pieces, requests are preempted,
loads wait for room."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.compare import assert_same
from vllm_rig.messages import Ask
from vllm_rig.pair import BLOCK, Pair, hit, prompt

pytestmark = pytest.mark.slow_engine

BLOCKS = 24


@pytest.fixture
def small(start: Callable[..., Pair], rng: random.Random) -> Pair:
    pair = start(
        max_model_len=512,
        num_gpu_blocks_override=BLOCKS,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    pair.connected(rng)
    pair.engine.forget()
    return pair


def preemptions(pair: Pair) -> float:
    return pair.engine.metrics()["vllm:num_preemptions_total"]


@pytest.mark.parametrize("tokens", [64, 65, 330, 480])
def test_prompt_is_loaded_when_it_was_computed_in_pieces(
    small: Pair, rng: random.Random, tokens: int
) -> None:
    ask = Ask(prompt(rng, tokens))
    (cold,) = small.stored(ask)
    warm = small.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)
    assert_same(small.recomputed(ask), warm)


def test_outputs_are_right_when_requests_are_preempted(small: Pair, rng: random.Random) -> None:
    # No two of them fit whole, so that any two at once will do.
    asks = [Ask(prompt(rng, 60), max_tokens=340) for _ in range(5)]
    expected = small.all_recomputed(asks)
    before = preemptions(small)
    for right, found in zip(expected, small.engine.generate(asks), strict=True):
        assert_same(right, found)
    eventually(lambda: preemptions(small) > before, "a preemption: the engine was too large")
    for ask, right in zip(asks[:3], expected[:3], strict=True):
        longer = Ask(ask.tokens + right.tokens)
        assert_same(small.recomputed(longer), small.reloaded(longer))
    small.idle()


def test_outputs_are_right_when_loads_ask_for_more_blocks_than_there_are(
    small: Pair, rng: random.Random
) -> None:
    common = prompt(rng, 200)
    asks = [Ask(common + prompt(rng, 200), max_tokens=40) for _ in range(6)]
    assert sum(hit(ask) for ask in asks) > 2 * BLOCKS * BLOCK
    expected = small.all_recomputed(asks)
    small.stored(asks[0])
    for ask in asks[1:]:
        small.engine.ask(ask)
    for _ in range(3):
        small.engine.forget()
        for right, found in zip(expected, small.engine.generate(asks), strict=True):
            assert_same(right, found)
    small.idle()
