"""LoRA adapters: KV is shared by requests with the same weights in their adapter, by no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_rig import adapters
from vllm_rig.bay import Bay
from vllm_rig.compare import assert_same, difference
from vllm_rig.messages import Ask
from vllm_rig.pair import Pair, hit, prompt

pytestmark = pytest.mark.slow_engine

Start = Callable[..., Pair]

_OPTIONS = {"enable_lora": True, "max_lora_rank": adapters.RANK, "max_loras": 2}


@pytest.fixture
def pair(start: Start, rng: random.Random) -> Pair:
    pair = start(**_OPTIONS)
    pair.connected(rng)
    pair.engine.forget()
    return pair


@pytest.fixture
def adapter(tmp_path: Path, checkpoint: Path) -> Path:
    return adapters.write(tmp_path / "adapter", checkpoint, seed=1)


def test_pages_are_found_with_their_own_adapter_only(
    pair: Pair, adapter: Path, checkpoint: Path, tmp_path: Path, rng: random.Random
) -> None:
    other = adapters.write(tmp_path / "other", checkpoint, seed=2)
    base = Ask(prompt(rng, 200))
    names = {"one": adapter, "two": other}
    asks = [base, *(replace(base, lora=(name, str(path))) for name, path in names.items())]
    cold = [pair.stored(ask)[0] for ask in asks]
    assert [answer.cached for answer in cold] == [0, 0, 0]
    assert all(difference(cold[0], answer) for answer in cold[1:]), "the adapters change nothing"
    for ask, answer in zip(asks, cold, strict=True):
        warm = pair.reloaded(ask)
        assert warm.cached == hit(ask)
        assert_same(answer, warm)


def test_nothing_is_loaded_or_stored_when_an_adapters_files_change_beneath_the_engine(
    pair: Pair, adapter: Path, checkpoint: Path, rng: random.Random
) -> None:
    """vLLM goes on with the weights that it has loaded; which those are nobody can tell."""
    ask = Ask(prompt(rng, 200), lora=("swapped", str(adapter)))
    (cold,) = pair.stored(ask)
    adapters.write(adapter, checkpoint, seed=3)
    again = pair.reloaded(ask)
    assert again.cached == 0
    assert_same(cold, again)
    before = pair.stored_pages.keys()
    pair.engine.ask(Ask(prompt(rng, 200), lora=ask.lora))
    # Stores keep their order: what comes after is there, so what was before would be.
    pair.stored(wanted := Ask(prompt(rng, 100)))
    assert len(pair.stored_pages.keys() - before) == (100 + wanted.max_tokens - 1) // 32


def test_next_engine_finds_pages_of_an_adapter_and_none_of_another_one_in_its_place(
    pair: Pair, bay: Bay, start: Start, adapter: Path, checkpoint: Path, rng: random.Random
) -> None:
    """vLLM's hashes have the adapter's name and path, which are the same."""
    kept = Ask(prompt(rng, 200), lora=("kept", str(adapter)))
    (cold,) = pair.stored(kept)
    bay.empty()
    second = start(**_OPTIONS)
    warm = second.engine.ask(kept)
    assert warm.cached == hit(kept)
    assert_same(cold, warm)
    bay.empty()
    adapters.write(adapter, checkpoint, seed=4)
    third = start(**_OPTIONS)
    other = third.engine.ask(kept)
    assert other.cached == 0
    assert difference(cold, other), "the other adapter says the same: the test proves nothing"
