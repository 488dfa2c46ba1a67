"""LMCache itself, on the CPU, on a real daemon: its storage manager in this process, and its server
as a process with its own client (docs/lmcache.md)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs LMCache: make test-lmcache installs it")
# Before anything of LMCache. Its own reports to its makers, and its banner.
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1")

from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core import daemon_connection
from kvwarehouse_connectors.lmcache import adapter_core, page_store
from lmcache_rig.server import Client, LMCacheServer
from lmcache_rig.storage import Storage

_TEST_S = 240
_ROOM = {"dram": "64MiB", "nvme_capacity": "128MiB", "nvme_segment": "8MiB"}
_STALLED_S = daemon_connection._STALLED_S


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A start of LMCache's server imports torch and numba first."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(_TEST_S))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, also where the machine is so busy that a thread, or the daemon, gets no turn
    for seconds."""
    monkeypatch.setattr(adapter_core, "_LOOKUP_S", DEADLINE_S)
    monkeypatch.setattr(page_store, "_REGISTER_S", DEADLINE_S)
    monkeypatch.setattr(daemon_connection, "_CALL_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(daemon_connection, "_STALLED_S", DEADLINE_S)


@pytest.fixture
def end_is_seen(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that end or stop their daemon: the connector takes its silence for that as soon as
    it does in LMCache's server."""
    monkeypatch.setattr(daemon_connection, "_STALLED_S", _STALLED_S)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("disk"), **_ROOM) as serving:
        yield serving


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """For tests that do things to it."""
    with Serving(tmp_path, **_ROOM) as serving:
        yield serving


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Storage]]:
    """start(address, **settings): a storage manager, with a salt of the test's own unless told."""
    started: list[Storage] = []

    def begin(address: str, **settings: Any) -> Storage:
        storage = Storage(address, **{"salt": request.node.nodeid[:200], **settings})
        started.append(storage)
        return storage

    yield begin
    for storage in started:
        storage.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., tuple[LMCacheServer, Client]]]:
    """launch(address, **settings): a server as a process, and an engine's side of it."""
    pairs: list[tuple[LMCacheServer, Client]] = []

    def begin(address: str, **settings: Any) -> tuple[LMCacheServer, Client]:
        server = LMCacheServer(address, tmp_path / f"lmcache-{len(pairs)}.log", **settings)
        try:
            client = Client(server)
        except BaseException:
            server.kill()
            raise
        pairs.append((server, client))
        return server, client

    yield begin
    for server, client in pairs:
        client.close()
        assert server.end() in (0, -signal.SIGTERM), server.tail()
