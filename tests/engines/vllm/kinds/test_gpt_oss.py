"""What a hit in two cache groups gives over vLLM's own cache."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from vllm_rig.compare import assert_same
from vllm_rig.engine import Engine
from vllm_rig.kinds import GPT_OSS
from vllm_rig.messages import Ask
from vllm_rig.pair import Pair, prompt
from vllm_rig.settle import settle

pytestmark = pytest.mark.slow_engine


def test_shared_prefix_is_loaded_where_vllms_own_cache_has_none_of_it(
    plain_model: Callable[..., Engine], start_model: Callable[..., Pair], rng: random.Random
) -> None:
    """vLLM keeps of a window only what the end of a prompt needs: another prompt that shares 200
    tokens hits nothing. The warehouse has the blocks of every place, and gives 192."""
    first = prompt(rng, 300)
    asks = [Ask(first), Ask(first[:200] + prompt(rng, 100))]
    alone = [plain_model(GPT_OSS.shape).ask(ask) for ask in asks]
    assert [answer.cached for answer in alone] == [0, 0]

    pair = start_model(GPT_OSS.shape)
    pair.engine.ask(asks[0])
    settle(pair, rng)
    shared = pair.reloaded(asks[1])
    assert shared.cached == 192
    assert_same(shared, alone[1])
