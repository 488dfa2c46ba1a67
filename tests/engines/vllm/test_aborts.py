"""A request that its client gives up leaves nothing behind, wherever it is on its way: no block, no
pin, no half of a page."""

from __future__ import annotations

import random

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.compare import assert_same
from vllm_rig.messages import Ask
from vllm_rig.pair import Pair, hit, prompt

pytestmark = pytest.mark.slow_engine

LONG = 1500


def test_engine_goes_on_when_a_request_is_aborted_under_its_load(
    pair: Pair, rng: random.Random
) -> None:
    """The pages are on NVMe and the daemon, just stopped, does not bring them: the load is under
    way until its bound."""
    ask = Ask(prompt(rng, LONG))
    (cold,) = pair.stored(ask)
    pair.stored_pages.only_on_nvme()
    pair.engine.forget()
    other = Ask(prompt(rng, 100))
    expected = pair.recomputed(other)
    pair.daemon.pause()
    begun = pair.engine.begin(ask)
    eventually(lambda: fetching(pair) or begun.done(), "the load is under way")
    assert not begun.done()
    begun.abort()
    assert begun.answer().finish == "abort"
    assert_same(expected, pair.engine.ask(other))
    pair.daemon.resume()
    pair.connected(rng)
    pair.idle()
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)


def fetching(pair: Pair) -> float:
    """Requests that wait for a load."""
    return pair.engine.metrics().get("vllm:num_requests_kv_fetch_by_stage", 0)


@pytest.mark.parametrize("tokens", [300, LONG])
def test_what_was_stored_is_right_when_the_request_is_aborted_under_it(
    pair: Pair, rng: random.Random, tokens: int
) -> None:
    ask = Ask(prompt(rng, tokens), max_tokens=500, gives_up=True)
    assert pair.engine.ask(ask).finish == "abort"
    pair.idle()
    again = Ask(ask.tokens)
    assert_same(pair.recomputed(again), pair.reloaded(again))
    assert pair.stored_pages.bad_pages() == []


def test_nothing_is_left_behind_when_many_requests_are_aborted_at_any_moment(
    pair: Pair, rng: random.Random
) -> None:
    common = prompt(rng, 500)
    asks = [Ask(common + prompt(rng, rng.randrange(1, 500))) for _ in range(12)]
    pair.stored(asks[0])
    expected = pair.all_recomputed(asks)
    for round_ in range(4):
        pair.engine.forget()
        begun = [pair.engine.begin(ask) for ask in asks]
        for place, call in enumerate(begun):
            if rng.random() < 0.5:
                call.abort()
            elif place % 3 == round_ % 3:
                call.first()
        for call, right in zip(begun, expected, strict=True):
            found = call.answer()
            if found.finish != "abort":
                assert_same(right, found)
        pair.idle()
    for ask, right in zip(asks, expected, strict=True):
        assert_same(right, pair.reloaded(ask))
    assert pair.stored_pages.bad_pages() == []
