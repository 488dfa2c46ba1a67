"""A hit in several cache groups is one thing: a page of one group that went bad takes the others
with it, and nothing is half loaded."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from vllm_rig.compare import assert_same
from vllm_rig.messages import Ask
from vllm_rig.pair import Pair, hit, prompt
from vllm_rig.settle import settle
from vllm_rig.stock import PREFIX, WINDOW, copies, differing, stock

pytestmark = pytest.mark.slow_engine

Start = Callable[..., Pair]


@pytest.mark.parametrize(("rule", "block"), [(WINDOW, 8), (PREFIX, 0), (PREFIX, 4)])
def test_damaged_page_of_one_group_costs_computing_and_no_wrong_answer(
    start_model: Start, rng: random.Random, rule: str, block: int
) -> None:
    pair = start_model("gpt-oss")
    ask = Ask(prompt(rng, 300))
    cold = pair.engine.ask(ask)
    settle(pair, rng)
    before = stock(pair, ask.tokens)
    (page,) = (data for name, data in before.items() if (name.rule, name.block) == (rule, block))
    places = copies(pair, page)
    assert len(places) == 2, f"in DRAM and on NVMe: {places}"
    for place in places:
        place.flip(3, at=100)
    failed = pair.engine.metrics()["kvwarehouse_connector_failed_loads_total"]

    computed = pair.reloaded(ask)
    assert computed.cached == 0
    assert_same(cold, computed)
    assert pair.engine.metrics()["kvwarehouse_connector_failed_loads_total"] == failed + 1

    settle(pair, rng)
    assert differing(before, stock(pair, ask.tokens)) == []
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)
    assert pair.stored_pages.bad_pages() == []


def test_hit_ends_before_a_gap_in_a_window_until_the_gap_is_filled(
    start_model: Start, rng: random.Random
) -> None:
    """288 tokens need blocks 7 and 8 of the window's group, 256 blocks 6 and 7, 224 blocks 5 and 6:
    without block 7 there are 224, and what is computed then is stored."""
    pair = start_model("gpt-oss")
    ask = Ask(prompt(rng, 300))
    cold = pair.engine.ask(ask)
    settle(pair, rng)
    before = stock(pair, ask.tokens)
    (page,) = (data for name, data in before.items() if (name.rule, name.block) == (WINDOW, 7))
    for place in copies(pair, page):
        place.flip(3, at=100)
    assert len(stock(pair, ask.tokens)) == len(before) - 1  # who reads it finds out, and it goes
    shorter = pair.reloaded(ask)
    assert shorter.cached == 224
    assert_same(cold, shorter)
    settle(pair, rng)
    assert differing(before, stock(pair, ask.tokens)) == []
    assert pair.reloaded(ask).cached == hit(ask)
