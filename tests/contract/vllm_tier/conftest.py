"""The tier's core without vLLM: on a model of vLLM's tiering manager, over a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_tier_model.primary import Primary

Start = Callable[..., Primary]


@pytest.fixture
def start(request: pytest.FixtureRequest, patient: None) -> Iterator[Start]:
    """start(address, **settings): a tier in an engine, with a salt of the test's own unless told
    another, which knows its daemon. The bounds of its jobs are far off: a test that ends by one
    says so."""
    started: list[Primary] = []

    def begin(address: str, *, connected: bool = True, **settings: Any) -> Primary:
        given = {"salt": request.node.nodeid[:200], "load_timeout_s": 120, "store_timeout_s": 120}
        primary = Primary(address, **{**given, **settings})
        started.append(primary)
        return primary.connected() if connected else primary

    yield begin
    for primary in started:
        primary.core.close()
        primary.assert_untouched()
