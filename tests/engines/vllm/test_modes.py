"""Engines that only store, and engines that only load."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from vllm_rig.bay import Bay
from vllm_rig.compare import assert_same
from vllm_rig.messages import Ask
from vllm_rig.pair import Pair, hit, prompt

pytestmark = pytest.mark.slow_engine

MODES = ({"mode": "write_only"}, {"mode": "read_only"})
ROLES = ({"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"})


@pytest.mark.parametrize(
    ("writes", "reads"),
    [pytest.param(*MODES, id="modes"), pytest.param(*ROLES, id="roles")],
)
def test_writer_loads_nothing_and_reader_stores_nothing(
    start: Callable[..., Pair],
    bay: Bay,
    rng: random.Random,
    writes: dict[str, str],
    reads: dict[str, str],
) -> None:
    ask, new = Ask(prompt(rng, 300)), Ask(prompt(rng, 300))
    writer = start(settings=writes)
    (cold,) = writer.stored(ask)
    again = writer.reloaded(ask)
    assert again.cached == 0
    assert_same(cold, again)
    bay.empty()
    reader = start(settings=reads)
    warm = reader.engine.ask(ask)
    assert warm.cached == hit(ask)
    assert_same(cold, warm)
    before = reader.stored_pages.keys()
    reader.engine.ask(new)
    assert reader.reloaded(new).cached == 0
    bay.empty()  # what an engine has to store it stores before it ends
    assert reader.stored_pages.keys() == before
