"""Weights that change in a running engine: KV of the one is never served under the other, in this
engine or a later one, in whichever order somebody reloads, resets, computes and starts again."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.bay import Bay
from vllm_rig.compare import assert_same, difference
from vllm_rig.engine import Engine
from vllm_rig.messages import Answer, Ask
from vllm_rig.pair import Pair, hit, prompt

Start = Callable[..., Pair]
Swap = Callable[[Engine, int], None]


@pytest.fixture
def pair(start: Start, bay: Bay, rng: random.Random) -> Pair:
    bay.empty()  # it begins with the weights of its checkpoint
    pair = start()
    pair.connected(rng)
    pair.engine.forget()
    return pair


def _changes(pair: Pair, times: int) -> None:
    eventually(lambda: pair.counted("weights_changed") >= times, f"{times} changes are counted")


def _truth(pair: Pair, ask: Ask) -> Answer:
    answer = pair.recomputed(ask)
    assert answer.cached == 0
    return answer


@pytest.mark.slow_engine
def test_reload_and_plain_reset_in_either_order_and_a_restart(
    pair: Pair, start: Start, bay: Bay, swap: Swap, rng: random.Random
) -> None:
    ask, own = Ask(prompt(rng, 300)), Ask(prompt(rng, 300))
    (old,) = pair.stored(ask)
    swap(pair.engine, 0)
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask), "the same weights again: what is stored holds"
    assert_same(old, warm)

    # A reload and a plain reset. The first prompt sees the change, and has nothing to store with.
    swap(pair.engine, 1)
    new = pair.reloaded(ask)
    assert new.cached == 0
    assert difference(old, new), "the other weights say the same: the test proves nothing"
    _changes(pair, 1)
    assert_same(_truth(pair, ask), new)
    pair.stored(own)
    again = pair.reloaded(own)
    assert again.cached == hit(own), "what it stores from now on it finds again"
    assert_same(_truth(pair, own), again)

    # The other order, with nothing in between.
    pair.engine.forget()
    swap(pair.engine, 2)
    assert pair.engine.ask(ask).cached == 0
    _changes(pair, 2)
    third = pair.reloaded(own)
    assert third.cached == 0
    assert difference(again, third)
    assert_same(_truth(pair, own), third)

    # The old weights in a new engine: what was theirs, and nothing else.
    swap(pair.engine, 0)
    bay.empty()
    restarted = start()
    warm = restarted.engine.ask(ask)
    assert warm.cached == hit(ask)
    assert_same(old, warm)
    answer = restarted.engine.ask(own)
    assert answer.cached == 0
    assert_same(_truth(restarted, own), answer)


def test_nothing_is_loaded_or_stored_between_a_reload_and_the_reset(
    pair: Pair, start: Start, bay: Bay, swap: Swap, rng: random.Random
) -> None:
    """vLLM goes on with KV of the old weights: what it computes then is of neither."""
    ask = Ask(prompt(rng, 300))
    longer = Ask([*ask.tokens, *prompt(rng, 200)])
    foreign = Ask(prompt(rng, 300))
    (old,) = pair.stored(ask)
    pair.stored(foreign)
    pair.reloaded(ask)
    before = pair.stored_pages.keys()
    swap(pair.engine, 1)
    mixed = [pair.engine.ask(longer), pair.engine.ask(foreign)]
    assert mixed[0].cached == hit(ask), "vLLM's own stale blocks"
    assert mixed[1].cached == 0, "in vLLM's cache no more, and not ours to give"
    _changes(pair, 1)
    pair.engine.ask(Ask(prompt(rng, 300)))

    def dropped() -> bool:
        # The storing thread tells of it when it gets a turn, and the engine with its next step.
        pair.engine.ask(Ask(prompt(rng, 8), max_tokens=1))
        return pair.counted("dropped_blocks") > 0

    eventually(dropped, "what was given to be stored is dropped")
    assert pair.stored_pages.keys() == before

    pair.engine.forget()
    (new,) = pair.stored(longer)
    assert new.cached == 0
    assert difference(mixed[0], new)
    assert_same(_truth(pair, longer), new)
    assert pair.reloaded(longer).cached == hit(longer)

    swap(pair.engine, 0)
    bay.empty()
    restarted = start()
    assert_same(old, restarted.engine.ask(ask))
    answer = restarted.engine.ask(longer)
    assert answer.cached == hit(ask), "of the longer one, what the old weights computed"
    assert_same(_truth(restarted, longer), answer)
