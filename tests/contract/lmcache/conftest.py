"""The LMCache connector without LMCache: on a model of its calls, over a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache_model.server import Server

Start = Callable[..., Server]


@pytest.fixture
def start(request: pytest.FixtureRequest, patient: None) -> Iterator[Start]:
    """start(address, **settings): a server, with a salt of the test's own unless told another. The
    bounds of its calls are far off: a test that ends by one says so."""
    started: list[Server] = []

    def begin(address: str, **settings: Any) -> Server:
        given = {"salt": request.node.nodeid[:200], "load_timeout_s": 120, "store_timeout_s": 120}
        server = Server(address, **{**given, **settings})
        started.append(server)
        return server

    yield begin
    for server in started:
        server.core.close()
