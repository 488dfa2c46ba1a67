"""Where the contract of clients is tested: every data path there is, each on a daemon of its own.

local, remote: the real daemon, by shared memory and by gRPC. model: gRPC to the real service over a
model of the core (tests/support/testkit), which needs no native build. Each twice: by the blocking
client, and by the one of asyncio, driven on a loop of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwarehouse import Client, Namespace, OpenNamespace, aio, connect
from kvwarehouse.aio.connect import connect_grpc as aio_connect_grpc
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_bench.harness.serving import Serving
from testkit.served import Served
from testkit.sync_adapter import SyncAdapter

PATHS = ("local", "remote", "model")
KINDS = ("blocking", "asyncio")
PAGE_TOKENS = 4
PAGE_BYTES = 4096
_STALLED_S = "kvwarehouse_connectors.core.daemon_connection._STALLED_S"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The daemon of a connector's tests that neither end nor empty it."""
    with Serving(tmp_path_factory.mktemp("disk"), dram="64MiB") as serving:
        yield serving


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """For tests that do things to it."""
    with Serving(tmp_path, dram="16MiB", nvme_capacity="64MiB", nvme_segment="8MiB") as serving:
        yield serving


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a connector a daemon whose heartbeat is late is none that stands still, so that a slow
    machine changes no result."""
    monkeypatch.setattr(_STALLED_S, DEADLINE_S)


@pytest.fixture
def silence_counts(patient: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As for an engine, once it is called: before a daemon is to stand still."""
    return lambda: monkeypatch.setattr(_STALLED_S, 1.0)


@pytest.fixture(scope="session")
def real_daemon() -> Iterator[str]:
    with PrivateDaemon({"dram": "256MiB"}) as daemon:
        yield daemon.address


@pytest.fixture(scope="session")
def model_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Served(tmp_path_factory.mktemp("model"), dram="64MiB", http="off") as served:
        yield f"unix://{served.config.socket}"


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def address(path: str, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("model_daemon" if path == "model" else "real_daemon"))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connected(kind: str) -> Callable[[str, str], Client]:
    """Connects to an address, over a path."""

    def make(path: str, address: str) -> Client:
        local = path == "local"
        if kind == "blocking":
            join = connect if local else connect_grpc
            return join(address, timeout_s=DEADLINE_S)
        join_loop = aio.connect if local else aio_connect_grpc
        return SyncAdapter(lambda: join_loop(address, timeout_s=DEADLINE_S))  # type: ignore[return-value]  it has the same calls

    return make


@pytest.fixture
def client(path: str, address: str, connected: Callable[[str, str], Client]) -> Iterator[Client]:
    with connected(path, address) as client:
        yield client


@pytest.fixture
def another(path: str, address: str, connected: Callable[[str, str], Client]) -> Iterator[Client]:
    with connected(path, address) as client:
        yield client


@pytest.fixture
def space(request: pytest.FixtureRequest) -> Namespace:
    """A namespace of the test's own."""
    return Namespace(
        model="contract",
        weights="w",
        dtype="uint8",
        layout="test/1",
        page_tokens=PAGE_TOKENS,
        page_bytes=PAGE_BYTES,
        salt=str(abs(hash(request.node.nodeid))),
    )


@pytest.fixture
def ns(client: Client, space: Namespace) -> OpenNamespace:
    return client.open(space)


@pytest.fixture
def pages(seed: int) -> Any:
    """Ten pages of noise."""
    return np.random.default_rng(seed).integers(0, 256, (10, PAGE_BYTES), dtype=np.uint8)
