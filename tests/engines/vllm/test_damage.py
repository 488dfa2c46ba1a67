"""Stored bytes that change where they lie are never computed on: the output is right, what was
damaged is taken out and stored again, good."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm_rig.compare import assert_same
from vllm_rig.messages import Answer, Ask
from vllm_rig.pair import BLOCK, Pair, blocks, hit, prompt
from vllm_rig.shelf import flip_each

from kvwarehouse.testing import damage
from kvwarehouse.testing.damage import Place
from kvwarehouse.testing.until import until

TOKENS = 330
PAGES = TOKENS // BLOCK


def page_bytes(pair: Pair) -> int:
    return pair.shelf.spaces()[0].page_bytes


def stored_page(pair: Pair, ask: Ask, page: int) -> tuple[Answer, Place]:
    """Stores the prompt, and finds where one of its pages lies."""
    if page:
        pair.stored(Ask(ask.tokens[: page * BLOCK + 1], max_tokens=1))
    before = pair.shelf.arena()
    pair.stored(Ask(ask.tokens[: (page + 1) * BLOCK + 1], max_tokens=1), new=1)
    places = pair.shelf.changed(before, page_bytes(pair))
    assert len(places) == 1, f"one page was stored, {len(places)} changed"
    (cold,) = pair.stored(ask, new=blocks(ask) - page - 1)
    return cold, places[0]


def check_recovery(pair: Pair, ask: Ask, expected: Answer) -> None:
    """The output is right at once; then the pages are there again, and good."""
    assert_same(expected, pair.reloaded(ask))
    until(lambda: taken_out(pair), "a page taken out")
    until(lambda: pair.reloaded(ask).cached == hit(ask), "the whole prompt is stored again")
    assert_same(expected, pair.reloaded(ask))
    following = Ask(ask.tokens + expected.tokens + ask.tokens[:40])
    assert_same(pair.recomputed(following), pair.reloaded(following))
    assert pair.shelf.bad_pages() == []


def taken_out(pair: Pair) -> int:
    core: dict[str, Any] = pair.shelf.client.status()["core"]
    return int(core["quarantined"])


@pytest.mark.parametrize("page", [0, 4, PAGES - 1])
def test_output_is_right_when_a_bit_of_a_stored_page_flips(
    pair: Pair, rng: random.Random, page: int
) -> None:
    ask = Ask(prompt(rng, TOKENS))
    cold, place = stored_page(pair, ask, page)
    before = taken_out(pair)
    place.flip(rng.randrange(8), at=rng.randrange(page_bytes(pair)))
    check_recovery(pair, ask, cold)
    assert taken_out(pair) > before


def test_output_is_right_when_every_stored_page_is_zeroed(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, TOKENS))
    before = pair.shelf.arena()
    (cold,) = pair.stored(ask)
    places = pair.shelf.changed(before, page_bytes(pair))
    assert len(places) == blocks(ask)
    for place in places:
        place.write(bytes(page_bytes(pair)))
    check_recovery(pair, ask, cold)


def test_output_is_right_when_two_stored_pages_change_places(
    pair: Pair, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, TOKENS))
    before = pair.shelf.arena()
    (cold,) = pair.stored(ask)
    places = pair.shelf.changed(before, page_bytes(pair))
    damage.swap(places[1], places[2], page_bytes(pair))
    check_recovery(pair, ask, cold)


def test_outputs_are_right_when_many_prompts_begin_with_a_bad_page(
    pair: Pair, rng: random.Random
) -> None:
    common = Ask(prompt(rng, TOKENS))
    _, place = stored_page(pair, common, 3)
    asks = [Ask(common.tokens + prompt(rng, rng.randrange(1, 100))) for _ in range(16)]
    expected = pair.all_recomputed(asks)
    place.flip(5)
    pair.engine.forget()
    for right, found in zip(expected, pair.engine.generate(asks), strict=True):
        assert_same(right, found)
    pair.engine.forget()
    for right, found in zip(expected, pair.engine.generate(asks), strict=True):
        assert_same(right, found)
    assert pair.shelf.bad_pages() == []
    pair.idle()


def test_output_is_right_when_a_page_on_nvme_is_bad(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, TOKENS))
    before = pair.shelf.arena()
    (cold,) = pair.stored(ask)
    places = pair.shelf.changed(before, page_bytes(pair))
    pages = [np.frombuffer(place.read(page_bytes(pair)), np.uint8) for place in places]
    pair.shelf.only_on_nvme()
    on_disk = [damage.find_one(pair.daemon.segments, page) for page in pages]
    flip_each(on_disk[2:4], at=17)
    check_recovery(pair, ask, cold)


def test_bad_page_harms_nobody_who_does_not_load_it(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, TOKENS))
    cold, place = stored_page(pair, ask, 8)
    place.flip(1)
    shorter = replace(ask, tokens=ask.tokens[: 8 * BLOCK + 5])
    warm = pair.reloaded(shorter)
    assert warm.cached == 8 * BLOCK
    assert_same(pair.recomputed(shorter), warm)
    check_recovery(pair, ask, cold)
