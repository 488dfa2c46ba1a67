"""A prompt whose blocks were stored is loaded, not computed, and its output is the same."""

from __future__ import annotations

import random

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.compare import assert_same
from vllm_rig.messages import Answer, Ask
from vllm_rig.pair import BLOCK, Pair, blocks, hit, prompt


@pytest.mark.parametrize("tokens", [33, 64, 65, 333, 1500])
def test_prompt_is_loaded_and_its_output_the_same_when_it_was_stored(
    pair: Pair, rng: random.Random, tokens: int
) -> None:
    ask = Ask(prompt(rng, tokens))
    (cold,) = pair.stored(ask)
    assert cold.cached == 0
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)
    assert_same(pair.recomputed(ask), warm)


def test_prompt_of_less_than_a_block_is_computed(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, BLOCK - 2))
    (cold,) = pair.stored(ask)
    warm = pair.reloaded(ask)
    assert (cold.cached, warm.cached) == (0, 0)
    assert_same(cold, warm)


def test_loaded_blocks_are_counted_when_they_came_from_the_warehouse(
    pair: Pair, rng: random.Random
) -> None:
    """A hit that nobody loaded would be vLLM's own, and prove nothing."""
    ask = Ask(prompt(rng, 333))
    pair.stored(ask)
    before, more = pair.counted("loaded_blocks"), hit(ask) // BLOCK
    pair.reloaded(ask)
    eventually(lambda: pair.counted("loaded_blocks") >= before + more, f"{more} more blocks loaded")
    assert pair.counted("loaded_blocks") == before + more


@pytest.mark.parametrize("shared", [320, 330])
def test_common_part_is_loaded_when_prompts_go_on_differently(
    pair: Pair, rng: random.Random, shared: int
) -> None:
    common = prompt(rng, shared)
    pair.stored(Ask(common + prompt(rng, 100)))
    other = Ask(common + prompt(rng, 57))
    warm = pair.reloaded(other)
    assert warm.cached == shared // BLOCK * BLOCK
    assert_same(pair.recomputed(other), warm)


def test_rest_is_loaded_when_the_engine_has_the_beginning_itself(
    pair: Pair, rng: random.Random
) -> None:
    whole = Ask(prompt(rng, 640))
    (cold,) = pair.stored(whole)
    pair.engine.forget()
    pair.engine.ask(Ask(whole.tokens[:170], max_tokens=1))
    warm = pair.engine.ask(whole)
    assert warm.cached == hit(whole)
    assert_same(cold, warm)


def test_generated_tokens_are_loaded_when_they_are_part_of_the_next_turn(
    pair: Pair, rng: random.Random
) -> None:
    history, kept = prompt(rng, 200), 0
    for _ in range(3):
        turn = Ask(history, max_tokens=100)
        (said,) = pair.stored(turn, new=blocks(turn) - kept)
        kept = blocks(turn)
        history = history + said.tokens + prompt(rng, 30)
        following = Ask(history, kv={"kvwarehouse.store": False})
        warm = pair.reloaded(following)
        assert warm.cached == kept * BLOCK
        assert_same(pair.recomputed(following), warm)


def test_same_prompts_at_once_are_each_loaded(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, 200))
    (cold,) = pair.stored(ask)
    pair.engine.forget()
    for warm in pair.engine.generate([ask] * 8):
        assert warm.cached == hit(ask)
        assert_same(cold, warm)


def test_sampled_output_is_the_same_when_its_seed_is(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, 150), max_tokens=24, temperature=1.0, seed=rng.randrange(1 << 30))
    (cold,) = pair.stored(ask)
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)


def test_prompt_is_computed_when_its_own_probabilities_are_asked_for(
    pair: Pair, rng: random.Random
) -> None:
    """vLLM needs every token's logits then, and takes nothing from caches."""
    tokens = prompt(rng, 150)
    (cold,) = pair.stored(Ask(tokens))
    warm = pair.reloaded(Ask(tokens, prompt_logprobs=1))
    assert warm.cached == 0
    assert_same(cold, warm)


def test_prompt_is_loaded_when_its_pages_are_only_on_nvme(pair: Pair, rng: random.Random) -> None:
    ask = Ask(prompt(rng, 700))
    (cold,) = pair.stored(ask)
    pair.stored_pages.only_on_nvme()
    warm = pair.reloaded(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)


def test_outputs_are_right_when_many_prompts_come_at_once(pair: Pair, rng: random.Random) -> None:
    """64 of them, of eight families with a common beginning each."""
    families = [prompt(rng, rng.randrange(40, 200)) for _ in range(8)]
    asks = [Ask(rng.choice(families) + prompt(rng, rng.randrange(10, 200))) for _ in range(64)]
    expected = pair.all_recomputed(asks)
    check(pair.engine.generate(asks), expected)
    eventually(lambda: pair.reloaded(asks[-1]).cached == hit(asks[-1]), "the last prompt is stored")
    pair.engine.forget()
    warm = pair.engine.generate(asks)
    check(warm, expected)
    assert sum(one.cached for one in warm) > sum(map(hit, asks)) * 3 // 4
    pair.idle()


def check(found: list[Answer], expected: list[Answer]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same(other, one)


def test_daemon_is_told_what_was_found_for_each_request(pair: Pair, rng: random.Random) -> None:
    """And why not more, though the engine has stored it by then."""
    ask = Ask(prompt(rng, 333))
    client = pair.stored_pages.client

    def noted(tokens: int) -> tuple[int, int, list[tuple[int, str]]] | None:
        one = next((each for each in client.requests() if each.note.tokens == tokens), None)
        if one is None:
            return None
        runs = [(run.first, run.state) for part in one.missing for run in part.runs]
        return one.note.found_tokens, one.note.load_tokens, runs

    pair.stored(ask)
    eventually(lambda: noted(333) == (0, 0, [(0, "unknown")]), "a note of a new prompt")
    pair.reloaded(ask)
    eventually(lambda: noted(333) == (hit(ask), hit(ask), []), "a note of a prompt that hit")
    longer = Ask([*ask.tokens[: hit(ask)], *prompt(rng, 100)])
    pair.reloaded(longer)
    first = hit(ask) // BLOCK
    expected = (hit(ask), hit(ask), [(first, "unknown")])
    eventually(lambda: noted(len(longer.tokens)) == expected, "a note of one that goes on")
