"""Speculative decoding with a draft that keeps KV of its own: it comes back as the target's does,
and what it drafts is accepted as often as without us."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_rig.checkpoints import Checkpoints
from vllm_rig.compare import assert_same
from vllm_rig.messages import Ask
from vllm_rig.pair import BLOCK, Pair, blocks, prompt

Start = Callable[..., Pair]

_DRAFTED = 2
_LIMIT = 2048
"""max_model_len of the engines here."""


def _speculative(method: str, checkpoints: Checkpoints, checkpoint: Path) -> dict[str, Any]:
    """A draft model with the target's own weights: nearly all that it drafts is accepted."""
    model = checkpoint if method == "draft_model" else checkpoints.draft(method)
    return {"method": method, "model": str(model), "num_speculative_tokens": _DRAFTED}


def _accepted(pair: Pair) -> tuple[float, float]:
    found = pair.engine.metrics()
    names = ("accepted_tokens", "draft_tokens")
    accepted, drafted = (found[f"vllm:spec_decode_num_{name}_total"] for name in names)
    return accepted, drafted


def _found(ask: Ask) -> int:
    """Tokens of a prompt that come back: of a draft head, blocks whose next token is known; of a
    draft model, all before the last token."""
    return (len(ask.tokens) - 1) // BLOCK * BLOCK


def _digests(pair: Pair) -> set[str]:
    """Of all blocks, of all layers, the draft's too."""
    (found,) = pair.engine.probe("rig_digests", list(range(1, 1024)))
    return set(found)


@pytest.mark.parametrize(
    "method",
    [
        "eagle",
        *(pytest.param(name, marks=pytest.mark.slow_engine) for name in ("draft_model", "eagle3")),
    ],
)
def test_drafts_come_back_with_the_targets_kv(
    method: str, start: Start, checkpoints: Checkpoints, checkpoint: Path, rng: random.Random
) -> None:
    pair = start(speculative_config=_speculative(method, checkpoints, checkpoint))
    pair.connected(rng)
    asks = [Ask(prompt(rng, tokens), max_tokens=24) for tokens in (300, 7 * BLOCK, 41)]
    for ask in asks:
        pair.engine.forget()
        nothing = _digests(pair)
        begin = _accepted(pair)
        before = pair.stored_pages.keys()
        cold = pair.engine.ask(ask)
        assert cold.cached == 0
        computed = _digests(pair) - nothing
        middle = _accepted(pair)
        pair.stored_pages.wait_new(before, _found(ask) // BLOCK)

        warm = pair.reloaded(ask)
        assert warm.cached == _found(ask)
        assert_same(cold, warm)
        end = _accepted(pair)
        cold_rate, warm_rate = (
            tuple(after - before for before, after in zip(one, other, strict=True))
            for one, other in ((begin, middle), (middle, end))
        )
        assert cold_rate == warm_rate, "accepted and drafted tokens"
        if method == "draft_model":
            assert cold_rate[0] > 0.8 * cold_rate[1], "the draft is the target itself"

        # The bytes of all layers, the draft's too, are as the engine left them.
        pair.engine.forget()
        pair.engine.ask(Ask(ask.tokens, max_tokens=1))
        assert len(computed & _digests(pair)) >= _found(ask) // BLOCK


def test_blocks_of_another_continuation_are_not_found_with_a_draft_head(
    start: Start, checkpoints: Checkpoints, checkpoint: Path, rng: random.Random
) -> None:
    """The draft's KV of a block's last token depends on the token behind it."""
    pair = start(speculative_config=_speculative("eagle", checkpoints, checkpoint))
    pair.connected(rng)
    head = prompt(rng, 5 * BLOCK)
    one, other = (Ask([*head, *prompt(rng, 2 * BLOCK + 5)]) for _ in range(2))
    if one.tokens[5 * BLOCK] == other.tokens[5 * BLOCK]:
        other.tokens[5 * BLOCK] ^= 1
    pair.engine.forget()
    before = pair.stored_pages.keys()
    pair.engine.ask(one)
    pair.stored_pages.wait_new(before, 7)
    answer = pair.reloaded(other)
    assert answer.cached == 4 * BLOCK
    assert_same(pair.recomputed(other), answer)


@pytest.mark.slow_engine
def test_steps_without_a_draft_store_nothing_nor_does_what_builds_on_them(
    start: Start, checkpoints: Checkpoints, checkpoint: Path, rng: random.Random
) -> None:
    """vLLM leaves out a step's draft where one request is nearly as long as it may be."""
    pair = start(speculative_config=_speculative("draft_model", checkpoints, checkpoint))
    pair.connected(rng)
    pair.engine.forget()
    long = Ask(prompt(rng, _LIMIT - 4), max_tokens=3)
    sibling = Ask([*long.tokens[: 10 * BLOCK], *prompt(rng, 100)], max_tokens=4)
    short = Ask(prompt(rng, 300), max_tokens=4)
    before = pair.stored_pages.keys()
    pair.engine.ask(long)
    assert pair.engine.ask(sibling).cached == 10 * BLOCK, "of vLLM's own blocks"
    pair.stored(short)
    assert len(pair.stored_pages.keys() - before) == blocks(short)
    pair.engine.forget()
    pair.stored(sibling)
    assert pair.reloaded(sibling).cached == _found(sibling)
