"""What one engine stored the next one finds, if it computes the same; and it computes what vLLM
without a connector does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_rig.bay import Bay
from vllm_rig.checkpoints import Checkpoints
from vllm_rig.compare import assert_same, difference
from vllm_rig.engine import Engine
from vllm_rig.messages import Ask
from vllm_rig.options import engine_options
from vllm_rig.pair import Pair, hit, prompt


def test_pages_are_found_by_the_next_engine_and_not_with_other_weights_at_the_same_path(
    start: Callable[..., Pair],
    bay: Bay,
    checkpoints: Checkpoints,
    checkpoint: Path,
    rng: random.Random,
) -> None:
    """vLLM's own file store goes by the path: after an update of the weights it serves KV of the
    old ones."""
    ask = Ask(prompt(rng, 300))
    bay.empty()  # after a reset an engine shares what it stores with nobody
    old = start()
    old.connected(rng)
    (cold,) = old.stored(ask)
    bay.empty()
    try:
        checkpoints.copy(checkpoint, seed=1)
        updated = start()
        updated.connected(rng)
        (other,) = updated.stored(ask)
        assert other.cached == 0
        assert difference(cold, other), "the other weights say the same: the test proves nothing"
        assert_same(updated.recomputed(ask), other)
        bay.empty()
    finally:
        checkpoints.copy(checkpoint)
    again = start()
    warm = again.engine.ask(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)
    assert bay.starts >= 3


@pytest.mark.slow_engine
def test_outputs_are_those_of_vllm_without_a_connector(
    start: Callable[..., Pair], bay: Bay, checkpoint: Path, rng: random.Random
) -> None:
    pair = start()
    pair.connected(rng)
    asks = [Ask(prompt(rng, rng.randrange(40, 900)), max_tokens=40) for _ in range(12)]
    pair.stored(*asks)
    warm = [pair.reloaded(ask) for ask in asks]
    assert all(found.cached == hit(ask) for ask, found in zip(asks, warm, strict=True))
    plain: Engine = bay.get(Engine, engine_options(checkpoint))
    for ask, found in zip(asks, warm, strict=True):
        plain.forget()
        assert_same(plain.ask(ask), found)
