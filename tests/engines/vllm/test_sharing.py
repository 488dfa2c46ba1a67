"""Who finds whose pages: nobody across salts, after a reset, or against a request's own wish."""

from __future__ import annotations

import random
from dataclasses import replace

from vllm_rig.compare import assert_same
from vllm_rig.messages import Ask
from vllm_rig.pair import Pair, hit, prompt


def test_pages_are_found_under_their_own_salt_only(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, 200), salt="one")
    pair.stored(ask)
    assert pair.reloaded(replace(ask, salt="other")).cached == 0
    assert pair.reloaded(replace(ask, salt=None)).cached == 0
    assert pair.reloaded(ask).cached == hit(ask)


def test_pages_are_found_when_vllm_forgets_and_not_when_the_connector_does(
    pair: Pair, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, 200))
    (cold,) = pair.stored(ask)
    assert pair.reloaded(ask).cached == hit(ask)
    pair.engine.forget(connector=True)
    (fresh,) = pair.stored(ask)
    assert fresh.cached == 0
    assert_same(cold, fresh)
    assert pair.reloaded(ask).cached == hit(ask)


def test_request_that_began_before_a_reset_stores_nothing_that_is_found_after_it(
    pair: Pair, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, 200), max_tokens=1000, resets=True)
    said = pair.engine.ask(ask)
    following = Ask(ask.tokens + said.tokens)
    assert pair.reloaded(following).cached == 0


def test_request_is_computed_when_it_says_load_false(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, 200))
    (cold,) = pair.stored(ask)
    skipped = pair.reloaded(replace(ask, kv={"kvwarehouse.load": False}))
    assert skipped.cached == 0
    assert_same(cold, skipped)
    assert pair.reloaded(ask).cached == hit(ask)


def test_nothing_is_stored_of_a_request_that_says_store_false(
    pair: Pair, rng: random.Random
) -> None:
    before = pair.stored_pages.keys()
    unwanted = Ask(prompt(rng, 200), kv={"kvwarehouse.store": False})
    pair.engine.ask(unwanted)
    # Stores keep their order: what comes after is there, so what was before would be.
    pair.stored(wanted := Ask(prompt(rng, 100)))
    assert len(pair.stored_pages.keys() - before) == (100 + wanted.max_tokens - 1) // 32
    assert pair.reloaded(replace(unwanted, kv={})).cached == 0
