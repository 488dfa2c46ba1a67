"""Other algorithms for vLLM's block hashes: pages are found again by the next engine."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from vllm_rig.bay import Bay
from vllm_rig.compare import assert_same
from vllm_rig.messages import Ask
from vllm_rig.pair import Pair, hit, prompt


@pytest.mark.slow_engine
@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash"])
def test_next_engine_finds_pages_whatever_the_hash_algorithm(
    start: Callable[..., Pair], bay: Bay, rng: random.Random, algorithm: str
) -> None:
    """vLLM begins xxhash with other bytes in every process."""
    ask = Ask(prompt(rng, 300))
    first = start(prefix_caching_hash_algo=algorithm)
    first.connected(rng)
    (cold,) = first.stored(ask)
    bay.empty()
    warm = start(prefix_caching_hash_algo=algorithm).engine.ask(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)
