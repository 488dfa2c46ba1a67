"""The tier's core without vLLM: on a model of vLLM's tiering manager, over a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse_bench.harness.serving import Serving
from vllm_tier_model.primary import Primary

Start = Callable[..., Primary]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("disk"), dram="64MiB") as serving:
        yield serving


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """For tests that do things to it."""
    with Serving(tmp_path, dram="16MiB", nvme_capacity="64MiB", nvme_segment="8MiB") as serving:
        yield serving


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
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
