"""What vLLM offloads of other models and in other shapes comes back from the warehouse as well: the
tier takes chunks as they are."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from vllm_rig.bay import Bay
from vllm_rig.checkpoints import Checkpoints
from vllm_rig.compare import assert_same
from vllm_rig.daemon import Daemon
from vllm_rig.messages import Answer, Ask
from vllm_rig.pair import BLOCK, prompt
from vllm_rig.stored_pages import StoredPages
from vllm_rig.tiering import SOON_S, Tiering

TOKENS = 333


@dataclass(frozen=True)
class TierKind:
    """draft: whether the model drafts for itself, whose guesses are then right."""

    shape: str
    options: dict[str, Any] = field(default_factory=dict)
    chunk_tokens: int = BLOCK
    draft: bool = False


def slow(name: str, kind: TierKind) -> Any:
    return pytest.param(kind, id=name, marks=pytest.mark.slow_engine)


KINDS = [
    pytest.param(TierKind("gemma3"), id="gemma3"),
    slow("gpt-oss", TierKind("gpt-oss")),
    slow("four blocks a chunk", TierKind("llama", {"blocks_per_chunk": 4}, 4 * BLOCK)),
    slow("two ranks", TierKind("llama", {"tensor_parallel_size": 2})),
    slow("draft model", TierKind("llama", draft=True)),
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> TierKind:
    found: TierKind = request.param
    return found


@pytest.fixture
def tiering(
    kind: TierKind, bay: Bay, daemon: Daemon, stored_pages: StoredPages, checkpoints: Checkpoints
) -> Tiering:
    checkpoint = checkpoints.get(kind.shape)
    options = dict(kind.options)
    if kind.draft:
        options["speculative_config"] = {
            "method": "draft_model",
            "model": str(checkpoint),
            "num_speculative_tokens": 2,
        }
    return Tiering(bay, daemon, stored_pages, checkpoint, **options)


def whole_again(tiering: Tiering, kind: TierKind, ask: Ask, rng: random.Random) -> Answer:
    """The answer, once all of the prompt comes from the tier that can."""
    whole = (TOKENS - 1) // kind.chunk_tokens * kind.chunk_tokens

    def comes() -> Answer | None:
        answer = tiering.reloaded(ask, rng)
        return answer if answer.cached >= whole else None

    answer: Answer = eventually(comes, "a prompt that comes back whole")
    return answer


def test_prompts_come_back_whole_and_right(
    tiering: Tiering, kind: TierKind, rng: random.Random
) -> None:
    shared = prompt(rng, 200)
    asks = [Ask(prompt(rng, TOKENS)), *(Ask(shared + prompt(rng, 133)) for _ in range(3))]
    expected = [tiering.recomputed(ask) for ask in asks]
    for ask, right in zip(asks, expected, strict=True):
        assert_same(right, tiering.engine.ask(ask, SOON_S))
    for ask, right in zip(asks, expected, strict=True):
        assert_same(right, whole_again(tiering, kind, ask, rng))
    tiering.forget(rng)
    for right, answer in zip(expected, tiering.engine.generate(asks, SOON_S), strict=True):
        assert_same(right, answer)
    if kind.draft:
        counted = tiering.engine.metrics()
        accepted = counted["vllm:spec_decode_num_accepted_tokens_total"]
        assert accepted > 0.9 * counted["vllm:spec_decode_num_draft_tokens_total"]


@pytest.mark.slow_engine
def test_prompt_comes_back_in_the_next_engine(
    tiering: Tiering, kind: TierKind, bay: Bay, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, TOKENS))
    right = tiering.engine.ask(ask, SOON_S)
    before = whole_again(tiering, kind, ask, rng)
    bay.empty()
    again = tiering.engine.ask(ask, SOON_S)
    assert again.cached >= before.cached
    assert_same(right, again)
