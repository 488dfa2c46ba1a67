"""Latent attention: one vector a token and layer, the same on every rank.

vLLM's prefill and its decode of it disagree on the CPU, so that texts cannot tell whether the
right bytes were loaded. The bytes themselves can.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import pytest

from vllm_rig.kinds import DEEPSEEK3
from vllm_rig.messages import Ask
from vllm_rig.pair import Pair, hit, prompt
from vllm_rig.settle import settle
from vllm_rig.stock import Bytes, differing, stock

pytestmark = pytest.mark.slow_engine

Start = Callable[..., Pair]
_BLOCKS = range(DEEPSEEK3.options["num_gpu_blocks_override"])


@pytest.fixture
def pair(start_model: Start) -> Pair:
    return start_model(DEEPSEEK3.shape, **DEEPSEEK3.options)


def digest(page: Bytes) -> str:
    return hashlib.blake2b(page.tobytes(), digest_size=16).hexdigest()


def in_the_engine(pair: Pair) -> set[str]:
    """Digests of all its blocks."""
    (rank,) = pair.engine.probe("rig_digests", list(_BLOCKS))
    return set(rank)


def test_blocks_hold_after_a_load_what_was_computed_into_them(
    pair: Pair, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, 300))
    pair.engine.ask(ask)
    computed = in_the_engine(pair)
    settle(pair, rng)
    stored = {digest(page) for page in stock(pair, ask.tokens).values()}
    assert len(stored) == hit(ask) // DEEPSEEK3.block
    assert stored <= computed

    assert not stored & in_the_engine(pair), "blocks that nobody uses are spoilt"
    assert pair.reloaded(ask).cached == hit(ask)
    assert stored <= in_the_engine(pair)


def test_pages_that_were_loaded_are_those_that_another_computation_stores(
    pair: Pair, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, 300))
    pair.engine.ask(ask)
    settle(pair, rng)
    first = stock(pair, ask.tokens)
    assert pair.reloaded(ask).cached == hit(ask)
    pair.stored_pages.client.clear(all=True)
    assert stock(pair, ask.tokens) == {}
    assert pair.reloaded(ask).cached == 0
    settle(pair, rng)
    assert differing(first, stock(pair, ask.tokens)) == []


def test_another_prompt_loads_what_it_shares(pair: Pair, rng: random.Random) -> None:
    first = prompt(rng, 300)
    pair.engine.ask(Ask(first))
    settle(pair, rng)
    assert pair.reloaded(Ask(first[:200] + prompt(rng, 100))).cached == 192
