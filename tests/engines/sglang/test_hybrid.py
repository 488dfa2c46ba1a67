"""Models with states beside their KV, through SGLang's real hybrid controller and pools (v2)."""

from __future__ import annotations

from typing import Any

import pytest

from kvwarehouse_bench.harness.serving import Serving
from sglang_rig.engine import config, prompt
from sglang_rig.hybrid import HybridEngine
from sglang_rig.pools import PAGE

BEFORE = pytest.mark.parametrize("before", [None, []], ids=["no keys", "keys"])
LAYOUT = pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])


def extra(serving: Serving, request: pytest.FixtureRequest) -> dict[str, Any]:
    return config(serving.address, **{"kvwarehouse.salt": request.node.nodeid[:200]})


@BEFORE
@LAYOUT
def test_a_prefix_comes_back_with_the_state_at_its_end(
    shared: Serving, request: pytest.FixtureRequest, layout: str, before: Any, seed: int
) -> None:
    tokens, given = prompt(seed, 4), extra(shared, request)
    with HybridEngine(layout, given) as engine:
        stored = engine.store(tokens, seed, [4], before)
        assert len({*stored.pages}) == 4
    with HybridEngine(layout, given) as another:
        back = another.restore([*tokens, *prompt(seed + 1, 2)], before)
        assert back.hit == 4 * PAGE
        assert back.pages == stored.pages
        assert back.state == stored.state


@BEFORE
def test_a_prefix_without_a_state_at_its_end_is_cut_to_one_that_has_it(
    shared: Serving, request: pytest.FixtureRequest, before: Any, seed: int
) -> None:
    tokens = prompt(seed, 5)
    with HybridEngine("page_first", extra(shared, request)) as engine:
        stored = engine.store(tokens, seed, [2], before)
        back = engine.restore(tokens, before)
        assert back.hit == 2 * PAGE
        assert back.pages == stored.pages[:2]
        assert back.state == stored.state


def test_a_prefix_without_any_state_is_not_restored(
    shared: Serving, request: pytest.FixtureRequest, seed: int
) -> None:
    tokens = prompt(seed, 4)
    with HybridEngine("page_first", extra(shared, request)) as engine:
        engine.store(tokens, seed, [], None)
        assert engine.restore(tokens, None).hit == 0
        assert engine.controller.storage_backend.batch_exists(_keys(tokens)) == 4


def _keys(tokens: list[int]) -> list[str]:
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return list(get_storage_hash_str(tokens, None, page_size=PAGE))
