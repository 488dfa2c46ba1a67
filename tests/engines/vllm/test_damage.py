"""Stored bytes that change where they lie are never computed on: the output is right, what was
damaged is taken out and stored again, good. A page has two copies, in the arena and on NVMe."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvwarehouse_bench.harness.eventually import eventually
from testkit import damage
from testkit.damage import Place
from vllm_rig.compare import assert_same
from vllm_rig.messages import Answer, Ask
from vllm_rig.pair import BLOCK, Pair, blocks, hit, prompt
from vllm_rig.stored_pages import flip_each

TOKENS = 330
PAGES = TOKENS // BLOCK


def page_bytes(pair: Pair) -> int:
    return pair.stored_pages.spaces()[0].page_bytes


def stored_page(pair: Pair, ask: Ask, page: int) -> tuple[Answer, Place]:
    """Stores the prompt, and finds where one of its pages lies."""
    if page:
        pair.stored(Ask(ask.tokens[: page * BLOCK + 1], max_tokens=1))
    before = pair.stored_pages.arena()
    pair.stored(Ask(ask.tokens[: (page + 1) * BLOCK + 1], max_tokens=1), new=1)
    places = pair.stored_pages.changed(before, page_bytes(pair))
    assert len(places) == 1, f"one page was stored, {len(places)} changed"
    (cold,) = pair.stored(ask, new=blocks(ask) - page - 1)
    return cold, places[0]


def stored_pages(pair: Pair, ask: Ask) -> tuple[Answer, list[Place]]:
    """Stores the prompt, and finds where all its pages lie: which is which nobody says."""
    before = pair.stored_pages.arena()
    (cold,) = pair.stored(ask)
    places = pair.stored_pages.changed(before, page_bytes(pair))
    assert len(places) == blocks(ask)
    return cold, places


def copies(pair: Pair, places: Sequence[Place]) -> list[Place]:
    """Of pages in the arena: these, and where they lie on NVMe."""
    assert pair.stored_pages.client.flush().pending == 0
    size = page_bytes(pair)
    pages = [np.frombuffer(place.read(size), np.uint8) for place in places]
    return [*places, *(damage.find_one(pair.daemon.segments, page) for page in pages)]


def check_recovery(pair: Pair, ask: Ask, expected: Answer) -> None:
    """The output is right at once, by computing; then the pages are there again, and good."""
    failed, bad = pair.counted("failed_loads"), taken_out(pair)
    assert_same(expected, pair.reloaded(ask))
    eventually(lambda: pair.counted("failed_loads") > failed, "a load that failed")
    eventually(lambda: taken_out(pair) > bad, "a page taken out")
    eventually(lambda: mended(pair, ask), "the whole prompt is stored again, good")
    assert_same(expected, pair.reloaded(ask))
    following = Ask(ask.tokens + expected.tokens + ask.tokens[:40])
    assert_same(pair.recomputed(following), pair.reloaded(following))
    assert pair.stored_pages.bad_pages() == []


def mended(pair: Pair, ask: Ask) -> bool:
    """After one more load: each finds the first bad copy, in DRAM or on NVMe; those behind it stay
    until they are read, unless their page goes with its parent."""
    return pair.reloaded(ask).cached == hit(ask) and not pair.stored_pages.bad_pages()


def taken_out(pair: Pair) -> int:
    core: dict[str, Any] = pair.stored_pages.client.status()["core"]
    return int(core["quarantined"])


@pytest.mark.parametrize(
    ("tokens", "page"),
    [
        (TOKENS, 0),
        (TOKENS, 4),
        (TOKENS, PAGES - 1),
        # Whole blocks: of a good last one only its last token would be computed.
        (PAGES * BLOCK, PAGES - 1),
    ],
)
def test_output_is_right_when_a_bit_of_a_stored_page_flips(
    pair: Pair, rng: random.Random, tokens: int, page: int
) -> None:
    ask = Ask(prompt(rng, tokens))
    cold, place = stored_page(pair, ask, page)
    for copy in copies(pair, [place]):
        copy.flip(rng.randrange(8), at=rng.randrange(page_bytes(pair)))
    check_recovery(pair, ask, cold)


def test_output_is_right_when_every_stored_page_is_zeroed(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, TOKENS))
    cold, places = stored_pages(pair, ask)
    for copy in copies(pair, places):
        copy.write(bytes(page_bytes(pair)))
    check_recovery(pair, ask, cold)


def test_output_is_right_when_two_stored_pages_change_places(
    pair: Pair, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, TOKENS))
    cold, places = stored_pages(pair, ask)
    one, other, one_on_nvme, other_on_nvme = copies(pair, places[1:3])
    damage.swap(one, other, page_bytes(pair))
    damage.swap(one_on_nvme, other_on_nvme, page_bytes(pair))
    check_recovery(pair, ask, cold)


def test_prompt_is_loaded_from_the_good_copy_when_only_one_is_bad(
    pair: Pair, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, TOKENS))
    cold, places = stored_pages(pair, ask)
    copies(pair, places)
    flip_each(places[2:4])
    failed = pair.counted("failed_loads")
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)
    assert_same(cold, pair.reloaded(ask))
    assert pair.counted("failed_loads") == failed
    assert pair.stored_pages.bad_pages() == []


def test_output_is_right_when_a_page_is_bad_that_is_only_on_nvme(
    pair: Pair, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, TOKENS))
    cold, places = stored_pages(pair, ask)
    _, _, *on_nvme = copies(pair, places[2:4])
    pair.stored_pages.only_on_nvme()
    flip_each(on_nvme, at=17)
    check_recovery(pair, ask, cold)


def test_outputs_are_right_when_many_prompts_begin_with_a_bad_page(
    pair: Pair, rng: random.Random
) -> None:
    common = Ask(prompt(rng, TOKENS))
    _, place = stored_page(pair, common, 3)
    asks = [Ask(common.tokens + prompt(rng, rng.randrange(1, 100))) for _ in range(16)]
    expected = pair.all_recomputed(asks)
    flip_each(copies(pair, [place]))
    for _ in range(2):
        pair.engine.forget()
        for right, found in zip(expected, pair.engine.generate(asks), strict=True):
            assert_same(right, found)
    eventually(lambda: mended(pair, common), "the bad page is stored again, good")
    pair.idle()


def test_bad_page_harms_nobody_who_does_not_load_it(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, TOKENS))
    cold, place = stored_page(pair, ask, 8)
    flip_each(copies(pair, [place]))
    shorter = replace(ask, tokens=ask.tokens[: 8 * BLOCK + 5])
    warm = pair.reloaded(shorter)
    assert warm.cached == 8 * BLOCK
    assert_same(pair.recomputed(shorter), warm)
    check_recovery(pair, ask, cold)
