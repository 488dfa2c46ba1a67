"""A daemon for each test, and the two ways to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwarehouse_bench.harness.serving import Serving


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="64MiB", nvme_capacity="256MiB", streams="40") as serving:
        yield serving


@pytest.fixture(params=["local", "remote"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)
