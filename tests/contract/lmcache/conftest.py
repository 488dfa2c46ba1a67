"""The LMCache connector without LMCache: on a model of its calls, over a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse_bench.harness.serving import Serving
from lmcache_model.server import Server

Start = Callable[..., Server]


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
    """start(address, **settings): a server, with a salt of the test's own unless told another."""
    started: list[Server] = []

    def begin(address: str, **settings: Any) -> Server:
        server = Server(address, **{"salt": request.node.nodeid[:200], **settings})
        started.append(server)
        return server

    yield begin
    for server in started:
        server.core.close()
