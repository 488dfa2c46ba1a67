"""The LMCache connector without LMCache: on a model of its calls, over a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache_model.server import Server

Start = Callable[..., Server]


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
