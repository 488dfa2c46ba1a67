"""Calls over gRPC: an error at once without a daemon, a new connection after its restart."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwarehouse import Client, Namespace, TransportError, UsageError, connect
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.errors import CapacityError
from testkit.served import Served

SPACE = Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=4096
)
TOKENS = list(range(40))


@pytest.fixture
def silent() -> Iterator[str]:
    """An address whose host takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def address_of(served: Served) -> str:
    return f"unix://{served.config.socket}"


def noise(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (10, 4096), dtype=np.uint8)


@pytest.mark.parametrize("address", ["unix:///tmp/kvw-no-such-daemon.sock", "127.0.0.1:9"])
def test_connecting_without_a_daemon_fails_and_says_how_to_start_one(address: str) -> None:
    with pytest.raises(TransportError, match="kvwarehouse serve") as caught:
        connect_grpc(address, timeout_s=60)
    assert caught.value.code == "unavailable"
    assert caught.value.retryable


def test_connecting_to_a_silent_host_ends_with_the_deadline(silent: str) -> None:
    with pytest.raises(TransportError):
        connect_grpc(silent, timeout_s=0.3)


def test_client_goes_on_after_the_daemon_was_restarted(tmp_path: Path, seed: int) -> None:
    pages, out = noise(seed), np.zeros((10, 4096), np.uint8)
    with Served(tmp_path) as served:
        client = connect_grpc(address_of(served))
        ns = client.open(SPACE)
        ns.store(TOKENS, pages)
    for call in (client.status, lambda: ns.lookup(TOKENS), lambda: ns.store(TOKENS, pages)):
        with pytest.raises(TransportError):
            call()
    with pytest.raises(TransportError):
        ns.load(TOKENS, out)
    with Served(tmp_path):
        assert ns.store(TOKENS, pages).stored == 10
        assert ns.load(TOKENS, out) == 10
        assert client.status()["state"] == "serving"
    client.close()


def test_namespace_is_opened_again_when_another_warehouse_took_the_place(
    tmp_path: Path, seed: int
) -> None:
    with Served(tmp_path) as served:
        client = connect_grpc(address_of(served))
        ns = client.open(SPACE)
    for ledger in (tmp_path / "arena").rglob("*"):
        if ledger.is_file():
            ledger.unlink()
    with Served(tmp_path):
        assert ns.lookup(TOKENS).pages == 0
        assert ns.store(TOKENS, noise(seed)).stored == 10
    client.close()


def test_load_cut_by_its_time_returns_what_arrived(tmp_path: Path, seed: int) -> None:
    with Served(tmp_path) as served, connect_grpc(address_of(served)) as client:
        ns = client.open(SPACE)
        ns.store(TOKENS, noise(seed))
        served.engine.unblock_loads.clear()
        loaded = ns.load(TOKENS, np.zeros((10, 4096), np.uint8), timeout_s=0.3)
        served.engine.unblock_loads.set()
    assert loaded == 0
    assert loaded.missed == {"timeout": 10}


def test_error_of_the_core_keeps_its_class_code_and_context(tmp_path: Path) -> None:
    with Served(tmp_path) as served, connect_grpc(address_of(served)) as client:
        served.core.fail = CapacityError("no room", code="full", context={"tier": "dram"})
        with pytest.raises(CapacityError, match="no room") as caught:
            client.flush()
        served.core.fail = None
    assert caught.value.code == "full"
    assert caught.value.context == {"tier": "dram"}
    assert caught.value.retryable


def failures_beside(client: Client, ending: Callable[[], object]) -> list[Exception]:
    """What eight threads that call at once hear when `ending` ends their calls."""
    failures: list[Exception] = []
    begun = threading.Barrier(9)

    def call() -> None:
        client.status()
        begun.wait(60)
        try:
            while True:
                client.status()
        except Exception as error:  # noqa: BLE001 - which one is what is asked
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    ending()
    for thread in threads:
        thread.join(60)
    return failures


def test_threads_that_share_a_client_hear_each_that_the_daemon_is_gone(tmp_path: Path) -> None:
    for _ in range(4):
        with ExitStack() as stack:
            client = connect_grpc(address_of(stack.enter_context(Served(tmp_path))))
            failures = failures_beside(client, stack.close)
            client.close()
        assert [type(failure) for failure in failures] == [TransportError] * 8, failures


def test_threads_that_share_a_client_hear_each_that_it_was_closed(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        for _ in range(8):
            client = connect_grpc(address_of(served))
            failures = failures_beside(client, client.close)
            codes = [getattr(failure, "code", failure) for failure in failures]
            assert len(codes) == 8
            assert set(codes) <= {"closed", "cancelled"}


def test_connections_to_a_daemon_that_is_gone_are_not_kept(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        client = connect_grpc(address_of(served))
    descriptors = []
    for _ in range(3):
        for _ in range(20):
            with pytest.raises(TransportError):
                client.status()
        gc.collect()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[2] <= descriptors[0] + 10
    client.close()


def test_client_refuses_calls_after_a_fork(tmp_path: Path) -> None:
    with Served(tmp_path) as served, connect_grpc(address_of(served)) as client:
        # A real fork beside running gRPC threads may hang; the client only looks at its pid.
        client._channel.endpoint.pid = os.getpid() - 1
        with pytest.raises(TransportError, match="fork") as caught:
            client.status()
        client._channel.endpoint.pid = os.getpid()
    assert not caught.value.retryable


def test_verify_takes_its_two_words_only() -> None:
    with pytest.raises(UsageError, match="boundary"):
        connect("unix:///tmp/x.sock", verify="never")  # type: ignore[arg-type]
