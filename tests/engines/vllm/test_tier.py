"""vLLM's own offloading with the warehouse beneath it: what comes back is what would be computed,
and vLLM goes on whatever the warehouse does. On a real engine, whose own CPU tier is so small that
it forgets what was a few prompts ago."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from testkit import damage
from vllm_rig import adapters
from vllm_rig.bay import Bay
from vllm_rig.compare import assert_same, difference
from vllm_rig.daemon import Daemon
from vllm_rig.engine import Engine
from vllm_rig.messages import Ask
from vllm_rig.pair import BLOCK, prompt
from vllm_rig.stored_pages import StoredPages
from vllm_rig.tiering import SOON_S, Tiering

pytestmark = pytest.mark.slow_engine

TOKENS = 330
WHOLE = TOKENS // BLOCK * BLOCK

Swap = Callable[[Engine, int], None]


@pytest.fixture
def tiering(bay: Bay, daemon: Daemon, stored_pages: StoredPages, checkpoint: Path) -> Tiering:
    return Tiering(bay, daemon, stored_pages, checkpoint)


def test_prompt_comes_back_from_the_tier_also_in_the_next_engine(
    tiering: Tiering, bay: Bay, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, TOKENS))
    cold = tiering.stored(ask, TOKENS // BLOCK)
    assert cold.cached == 0
    warm = tiering.reloaded(ask, rng)
    assert warm.cached == WHOLE
    assert_same(cold, warm)
    assert_same(warm, tiering.recomputed(ask))
    bay.empty()
    again = tiering.engine.ask(ask, SOON_S)
    assert again.cached == WHOLE
    assert_same(cold, again)


def test_prompt_with_an_adapter_comes_back_for_that_adapter_only(
    bay: Bay,
    daemon: Daemon,
    stored_pages: StoredPages,
    checkpoint: Path,
    tmp_path: Path,
    rng: random.Random,
) -> None:
    """Also the first prompt: it waits until the adapter's files were read."""
    options = {"enable_lora": True, "max_lora_rank": adapters.RANK, "max_loras": 2}
    tiering = Tiering(bay, daemon, stored_pages, checkpoint, **options)
    path = adapters.write(tmp_path / "adapter", checkpoint, seed=1)
    ask = Ask(prompt(rng, TOKENS), lora=("one", str(path)))
    cold = tiering.stored(ask, TOKENS // BLOCK)
    warm = tiering.reloaded(ask, rng)
    assert warm.cached == WHOLE
    assert_same(cold, warm)
    plain = tiering.engine.ask(replace(ask, lora=None))
    assert plain.cached == 0
    assert difference(cold, plain), "the adapter changes nothing"


def test_prompts_at_once_that_share_a_begin_are_right(tiering: Tiering, rng: random.Random) -> None:
    shared = prompt(rng, 140)
    asks = [Ask(shared[: rng.randrange(140)] + prompt(rng, 200)) for _ in range(6)]
    expected = [tiering.recomputed(ask) for ask in asks]
    tiering.engine.generate(asks)
    tiering.forget(rng)
    for right, found in zip(expected, tiering.engine.generate(asks), strict=True):
        assert_same(right, found)


def test_prompt_is_loaded_from_nvme(tiering: Tiering, rng: random.Random) -> None:
    ask = Ask(prompt(rng, TOKENS))
    cold = tiering.stored(ask, TOKENS // BLOCK)
    tiering.forget(rng)
    tiering.pages.only_on_nvme()
    warm = tiering.engine.ask(ask, SOON_S)
    assert warm.cached == WHOLE
    assert_same(cold, warm)


def test_output_is_right_when_a_stored_page_is_damaged(
    tiering: Tiering, rng: random.Random
) -> None:
    tiering.stored(Ask(prompt(rng, 2 * BLOCK), max_tokens=1), 2)
    ask = Ask(prompt(rng, TOKENS))
    size = tiering.pages.spaces()[0].page_bytes
    before = tiering.pages.arena()
    cold = tiering.stored(ask, TOKENS // BLOCK)
    (place, *_) = tiering.pages.changed(before, size)
    tiering.forget(rng)
    assert tiering.pages.client.flush().pending == 0
    page = np.frombuffer(place.read(size), np.uint8)
    for copy in [place, *damage.find(tiering.daemon.segments, page)]:
        copy.flip(3, at=rng.randrange(size))
    answer = tiering.engine.ask(ask, SOON_S)
    assert answer.cached < WHOLE
    assert_same(cold, answer)


@pytest.mark.parametrize("end", ["kill", "pause"])
def test_outputs_are_right_when_the_daemon_goes_and_it_is_used_when_it_is_back(
    tiering: Tiering, rng: random.Random, end: str
) -> None:
    asks = [Ask(prompt(rng, 700)) for _ in range(4)]
    cold = [tiering.stored(ask, 700 // BLOCK) for ask in asks]
    tiering.forget(rng)
    begun = [tiering.engine.begin(ask) for ask in asks]
    getattr(tiering.daemon, end)()
    for call, expected in zip(begun, cold, strict=True):
        assert_same(expected, call.answer(SOON_S))
    new = Ask(prompt(rng, TOKENS))
    alone = tiering.engine.ask(new, SOON_S)
    tiering.daemon.revive()
    tiering.connected(rng)
    assert_same(tiering.recomputed(new), alone)
    assert_same(cold[0], tiering.reloaded(asks[0], rng))


def test_nothing_stored_before_a_reset_is_loaded_after_it(
    tiering: Tiering, bay: Bay, rng: random.Random
) -> None:
    ask = Ask(prompt(rng, TOKENS))
    cold = tiering.stored(ask, TOKENS // BLOCK)
    tiering.engine.forget(connector=True)
    again = tiering.stored(ask, TOKENS // BLOCK)
    assert again.cached == 0
    assert_same(cold, again)
    warm = tiering.reloaded(ask, rng)
    assert warm.cached == WHOLE
    assert_same(cold, warm)
    bay.empty()  # it shares what it stores with nobody any more


def test_reload_without_a_reset_ends_loads_and_stores_until_the_connector_is_reset(
    tiering: Tiering, bay: Bay, swap: Swap, rng: random.Random
) -> None:
    """vLLM goes on with KV of the old weights: what it computes then is of neither."""
    bay.empty()  # it begins with the weights of its checkpoint
    tiering.connected(rng)
    foreign, ask, fresh = (Ask(prompt(rng, TOKENS)) for _ in range(3))
    longer = Ask([*ask.tokens, *prompt(rng, 200)])
    tiering.stored(foreign, TOKENS // BLOCK)
    old = tiering.stored(ask, TOKENS // BLOCK)
    assert tiering.reloaded(ask, rng).cached == WHOLE
    swap(tiering.engine, 1)
    alone = tiering.engine.ask(foreign, SOON_S)
    assert alone.cached == 0, "the first step that sees the change has loaded it"
    mixed = tiering.engine.ask(longer, SOON_S)
    assert mixed.cached == WHOLE, "vLLM's own stale blocks"
    tiering.engine.ask(fresh, SOON_S)
    assert_same(alone, tiering.recomputed(foreign))
    assert tiering.reloaded(fresh, rng).cached == 0, "a plain reset leaves vLLM's CPU tier as it is"

    tiering.engine.forget(connector=True)
    new = tiering.stored(longer, len(longer.tokens) // BLOCK)
    assert new.cached == 0
    assert difference(mixed, new), "the other weights say the same: the test proves nothing"
    warm = tiering.reloaded(longer, rng)
    assert warm.cached == len(longer.tokens) // BLOCK * BLOCK
    assert_same(new, warm)
    assert_same(tiering.recomputed(longer), new)

    swap(tiering.engine, 0)
    bay.empty()
    assert_same(old, tiering.engine.ask(ask, SOON_S))
    answer = tiering.engine.ask(longer, SOON_S)
    assert answer.cached == WHOLE, "of the longer one, what the old weights computed"
    assert_same(tiering.recomputed(longer), answer)
    assert tiering.engine.ask(fresh, SOON_S).cached == 0


def test_reload_and_reset_of_the_connector_in_either_order_and_a_restart(
    tiering: Tiering, bay: Bay, swap: Swap, rng: random.Random
) -> None:
    bay.empty()
    tiering.connected(rng)
    ask = Ask(prompt(rng, TOKENS))
    said = [tiering.stored(ask, TOKENS // BLOCK)]
    for seed, acts in enumerate([(0, 1), (1, 0)], 1):
        for act in acts:
            if act:
                tiering.engine.forget(connector=True)
            else:
                swap(tiering.engine, seed)
        new = tiering.stored(ask, TOKENS // BLOCK)
        assert new.cached == 0
        assert difference(said[-1], new), "the other weights say the same"
        warm = tiering.reloaded(ask, rng)
        assert warm.cached == WHOLE, "what it stores from now on it finds again"
        assert_same(new, warm)
        assert_same(tiering.recomputed(ask), new)
        said.append(new)
    swap(tiering.engine, 0)
    bay.empty()
    warm = tiering.engine.ask(ask, SOON_S)
    assert warm.cached == WHOLE
    assert_same(said[0], warm)
