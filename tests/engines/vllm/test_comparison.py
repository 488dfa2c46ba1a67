"""What the other tests judge by can fail: a zeroed page has to be noticed."""

from __future__ import annotations

import random

import pytest

from vllm_rig.compare import FLOAT32_TOLERANCE, assert_same, difference
from vllm_rig.engine import Engine
from vllm_rig.messages import Answer, Ask
from vllm_rig.pair import hit, prompt

LIKELY = {7: -0.5, 8: -2.0}
TIED = {7: -1.0, 8: -1.0 - FLOAT32_TOLERANCE / 4}


def answer(*steps: tuple[int, dict[int, float]], finish: str = "length") -> Answer:
    return Answer([token for token, _ in steps], [known for _, known in steps], 0, finish)


def test_answers_are_the_same_when_tokens_and_probabilities_are() -> None:
    assert difference(answer((7, LIKELY), (8, TIED)), answer((7, LIKELY), (8, TIED))) == ""


def test_answers_differ_when_another_token_is_taken_that_was_less_likely() -> None:
    assert "token 1" in difference(
        answer((7, LIKELY), (7, LIKELY)), answer((7, LIKELY), (8, {8: -0.5, 9: -2.0}))
    )


def test_answers_differ_when_equal_tokens_have_other_probabilities() -> None:
    moved = {7: -0.5 - 2 * FLOAT32_TOLERANCE, 8: -2.0}
    assert "token 0" in difference(answer((7, LIKELY)), answer((7, moved)))


def test_answers_are_the_same_when_tied_tokens_change_places_and_contexts_part() -> None:
    swapped = {7: TIED[8], 8: TIED[7]}
    assert difference(answer((7, TIED), (7, LIKELY)), answer((8, swapped), (9, {9: 0.0}))) == ""


def test_answers_differ_when_one_ended_in_another_way() -> None:
    aborted = answer((7, LIKELY), finish="abort")
    assert "abort" in difference(answer((7, LIKELY)), aborted)
    assert difference(answer((7, LIKELY)), answer())


@pytest.mark.parametrize("tokens", [40, 100, 700])
def test_outputs_differ_when_the_pages_beneath_them_are_zeroed(
    plain: Engine, rng: random.Random, tokens: int
) -> None:
    ask = Ask(prompt(rng, tokens))
    computed = plain.ask(ask)
    again = plain.ask(ask)
    assert again.cached == hit(ask)
    assert_same(computed, again)
    plain.probe("rig_fill_all", 0)
    spoilt = plain.ask(ask)
    assert spoilt.cached == hit(ask)
    assert difference(computed, spoilt)
    plain.forget()
    assert_same(computed, plain.ask(ask))


def test_request_ends_when_it_is_aborted(plain: Engine, rng: random.Random) -> None:
    given_up = plain.ask(Ask(prompt(rng, 50), max_tokens=1900, gives_up=True))
    assert given_up.finish == "abort"
    assert given_up.tokens
    plain.forget()


def test_outputs_of_many_at_once_are_those_of_one_after_another(
    plain: Engine, rng: random.Random
) -> None:
    """So that tests may ask either way."""
    asks = [Ask(prompt(rng, rng.randrange(20, 300))) for _ in range(16)]
    together = plain.generate(asks)
    plain.forget()
    for ask, one in zip(asks, together, strict=True):
        assert_same(plain.ask(ask), one)
