"""A client without patience: what reads never waits for a daemon, and never looks for a new one;
refresh does."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.embedded import PrivateDaemon

WAIT_S = 60.0
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=65536
)
TOKENS = range(40)
MORE = range(1000, 1040)


@pytest.fixture
def daemon() -> Iterator[PrivateDaemon]:
    with PrivateDaemon({"dram": "64MiB"}) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[kvw.Client]:
    with kvw.connect(daemon.address, patience_s=0, timeout_s=WAIT_S) as client:
        yield client


@pytest.fixture
def pages(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (10, 65536), dtype=np.uint8)


def page_of(tokens: Any) -> Any:
    """Bytes that follow from the tokens, so that any page can be checked."""
    seed = [abs(token) for token in tokens]
    return np.random.default_rng(seed).integers(0, 256, 65536, dtype=np.uint8)


def pages_of(tokens: Any) -> Any:
    return np.stack([page_of(tokens[: 4 * n + 4]) for n in range(len(tokens) // 4)])


def check_right_or_missing(ns: kvw.OpenNamespace, tokens: Any) -> int:
    out = np.zeros((len(tokens) // 4, 65536), np.uint8)
    filled = ns.load(tokens, out, timeout_s=0)
    assert np.array_equal(out[:filled], pages_of(tokens)[:filled])
    return filled


def test_reads_go_on_with_the_old_memory_until_refresh_finds_the_new_daemon(
    daemon: PrivateDaemon, client: kvw.Client
) -> None:
    ns = client.open(SPACE)
    ns.store(TOKENS, pages_of(TOKENS))
    daemon.kill()
    assert not client.refresh(timeout_s=WAIT_S)
    assert ns.lookup(TOKENS).pages == check_right_or_missing(ns, TOKENS) == 10
    daemon.start()
    with kvw.connect(daemon.address) as another:
        other = another.open(SPACE)
        other.store(MORE, pages_of(MORE))
        assert client.control().incarnation == 2  # the page is the same, what it names is not
        assert ns.lookup(MORE).pages == 0
        assert ns.tiers(TOKENS).all()
        assert ns.pin(TOKENS).pages == 10
        # Until every slot has had other pages: what the old index names is right, then gone.
        another.evict(SPACE, 100_000)
        for begin in range(2000, 2000 + 40 * 150, 40):
            tokens = range(begin, begin + 40)
            other.store(tokens, pages_of(tokens[:4]).repeat(10, axis=0))
            check_right_or_missing(ns, TOKENS)
        assert check_right_or_missing(ns, TOKENS) == 0
    assert client.refresh(timeout_s=WAIT_S)
    assert ns.lookup(TOKENS).pages == 0
    ns.store(TOKENS, pages_of(TOKENS))
    assert check_right_or_missing(ns, TOKENS) == 10


def test_refresh_is_true_and_changes_nothing_where_the_daemon_is_the_same(
    daemon: PrivateDaemon, client: kvw.Client, pages: Any
) -> None:
    ns = client.open(SPACE)
    ns.store(TOKENS, pages)
    assert client.refresh(timeout_s=WAIT_S)
    assert client.refresh(timeout_s=0)
    assert ns.lookup(TOKENS).pages == 10
    assert client.control().incarnation == 1


def test_store_of_a_client_without_patience_finds_the_new_daemon(
    daemon: PrivateDaemon, client: kvw.Client
) -> None:
    ns = client.open(SPACE)
    daemon.kill()
    with pytest.raises(kvw.TransportError):
        ns.store(TOKENS, pages_of(TOKENS))
    daemon.start()
    assert ns.store(TOKENS, pages_of(TOKENS)).stored == 10
    assert ns.lookup(TOKENS).pages == 10


def check_reads_go_on(
    client: kvw.Client, ns: kvw.OpenNamespace, refreshing: threading.Thread
) -> None:
    """Many calls of each kind end while one refresh, begun before them, has not."""
    for _ in range(300):
        assert ns.lookup(TOKENS).pages == 10
        assert ns.tiers(TOKENS).all()
        with ns.pin(TOKENS) as pins:
            assert pins.pages == 10
    assert check_right_or_missing(ns, TOKENS) == 10
    assert client.control().incarnation >= 1
    assert refreshing.is_alive()


def refreshing(client: kvw.Client, results: list[bool]) -> threading.Thread:
    thread = threading.Thread(target=lambda: results.append(client.refresh(timeout_s=WAIT_S)))
    thread.start()
    return thread


@pytest.mark.concurrency
@pytest.mark.parametrize("patience_s", [0, None])
def test_reads_do_not_wait_for_a_refresh_that_waits_for_its_answer(
    daemon: PrivateDaemon, patience_s: float | None
) -> None:
    """A listener in the daemon's place takes the hello and says nothing: then, for certain, the
    refresh waits in the socket."""
    with kvw.connect(daemon.address, patience_s=patience_s) as client:
        ns = client.open(SPACE)
        ns.store(TOKENS, pages_of(TOKENS))
        daemon.kill()
        os.unlink(daemon.socket)
        results: list[bool] = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(daemon.socket)
            listener.listen()
            listener.settimeout(WAIT_S)
            thread = refreshing(client, results)
            silent, _ = listener.accept()
            with silent:
                assert silent.recv(1 << 17)
                check_reads_go_on(client, ns, thread)
                assert not client.refresh(timeout_s=0)  # nobody said that there is a daemon
        thread.join(WAIT_S)
        assert results == [False]


@pytest.mark.concurrency
def test_reads_do_not_wait_for_a_refresh_of_a_new_daemon_that_is_stopped(
    daemon: PrivateDaemon, client: kvw.Client
) -> None:
    ns = client.open(SPACE)
    ns.store(TOKENS, pages_of(TOKENS))
    daemon.kill()
    daemon.start()
    os.kill(daemon.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.pid, os.WSTOPPED)
    results: list[bool] = []
    try:
        thread = refreshing(client, results)
        check_reads_go_on(client, ns, thread)
        assert not results
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    thread.join(WAIT_S)
    assert results == [True]
    assert ns.lookup(TOKENS).pages == 10


@pytest.fixture
def lost(daemon: PrivateDaemon) -> Callable[[], None]:
    """Puts a daemon that knows nothing into the place of the one before."""

    def lose() -> None:
        daemon.kill()
        shutil.rmtree(daemon.arena_dir)
        daemon.start()

    return lose


def test_namespace_that_a_new_daemon_does_not_know_is_registered_by_refresh(
    daemon: PrivateDaemon, client: kvw.Client, lost: Callable[[], None]
) -> None:
    ns = client.open(SPACE)
    ns.store(TOKENS, pages_of(TOKENS))
    lost()
    assert check_right_or_missing(ns, TOKENS) == 10  # of the old memory, which is still mapped
    assert client.refresh(timeout_s=WAIT_S)
    assert (ns.lookup(TOKENS).pages, ns.pin(TOKENS).pages) == (0, 0)
    assert SPACE.to_fields() in [each.fields for each in client.namespaces()]
    assert ns.store(TOKENS, pages_of(TOKENS)).stored == 10


def test_namespace_opened_without_reopening_says_that_it_is_unknown(
    daemon: PrivateDaemon, client: kvw.Client, lost: Callable[[], None]
) -> None:
    ns = client.open(SPACE, reopen=False)
    lost()
    assert client.refresh(timeout_s=WAIT_S)
    out = np.zeros((10, 65536), np.uint8)
    for call in (
        lambda: ns.lookup(TOKENS),
        lambda: ns.tiers(TOKENS),
        lambda: ns.load(TOKENS, out),
        lambda: ns.store(TOKENS, out),
        lambda: ns.pin(TOKENS),
    ):
        with pytest.raises(kvw.UsageError) as caught:
            call()
        assert caught.value.code == "namespace_unknown"
    assert client.open(SPACE, reopen=False).store(TOKENS, out).stored == 10
    assert ns.lookup(TOKENS).pages == 10


def test_reads_without_patience_miss_in_a_namespace_that_is_unknown(
    daemon: PrivateDaemon, client: kvw.Client, lost: Callable[[], None]
) -> None:
    """Another namespace's store found the new daemon; this one has not been registered there."""
    ns = client.open(SPACE)
    beside = client.open(kvw.Namespace(**{**SPACE.to_fields(), "salt": "beside"}))
    ns.store(TOKENS, pages_of(TOKENS))
    lost()
    assert beside.store(MORE, pages_of(MORE)).stored == 10
    assert ns.lookup(TOKENS).by_tier == {"hbm": 0, "dram": 0, "nvme": 0, "remote": 0}
    assert ns.tiers(TOKENS).tolist() == [0] * 10
    assert ns.pin(TOKENS).pages == 0
    loaded = ns.load(TOKENS, np.zeros((10, 65536), np.uint8))
    assert (loaded, loaded.missed) == (0, {"missing": 10})
    assert SPACE.to_fields() not in [each.fields for each in client.namespaces()]
    assert ns.store(TOKENS, pages_of(TOKENS)).stored == 10


def test_read_only_client_reads_and_stores_nothing(daemon: PrivateDaemon, pages: Any) -> None:
    with (
        kvw.connect(daemon.address) as writer,
        kvw.connect(daemon.address, read_only=True) as reader,
    ):
        ns = reader.open(SPACE)
        with pytest.raises(kvw.UsageError, match="read-only") as caught:
            ns.store(TOKENS, pages)
        assert caught.value.code == "read_only"
        writer.open(SPACE).store(TOKENS, pages)
        out = np.zeros_like(pages)
        assert ns.load(TOKENS, out) == 10
        assert np.array_equal(out, pages)
        assert ns.pin(TOKENS).pages == 10
        daemon.kill()
        daemon.start()
        assert reader.refresh(timeout_s=WAIT_S)
        assert ns.lookup(TOKENS).pages == 10
        with pytest.raises(kvw.UsageError):
            ns.store(MORE, pages)


def test_stores_are_taken_again_once_a_drain_is_taken_back(daemon: PrivateDaemon) -> None:
    pages = np.zeros((10, SPACE.page_bytes), np.uint8)
    with kvw.connect(daemon.address) as client:
        ns = client.open(SPACE)
        client.drain()
        assert ns.store(TOKENS, pages).stored == 0
        assert client.undrain()
        assert not client.control().draining
        assert ns.store(TOKENS, pages).stored == 10


def test_control_shows_the_daemon_without_a_call(daemon: PrivateDaemon) -> None:
    with kvw.connect(daemon.address) as client:
        control = client.control()
        assert (control.incarnation, control.draining) == (1, False)
        assert control.nvme_reads_queued == control.nvme_write_queue_bytes == 0
        assert 0 < control.reserve_limit_bytes < control.pin_limit_bytes <= 64 << 20
        core = client.status()["core"]
        assert (core["incarnation"], core["warehouse_id"]) == (1, control.warehouse_id)
        client.drain()
        assert client.control().draining
        daemon.kill()
        dead = client.control()
        while client.control().heartbeat_age_s == dead.heartbeat_age_s:
            pass  # a clock that only rises
        assert client.control().incarnation == 1


@pytest.mark.parametrize("patience_s", [-1, float("nan"), "x"])
def test_patience_is_a_number_of_seconds(patience_s: Any) -> None:
    with pytest.raises(kvw.UsageError, match="patience_s"):
        kvw.connect("unix:///tmp/none.sock", patience_s=patience_s)


@pytest.mark.parametrize("options", [{"patience_s": 0}, {"read_only": True}])
def test_options_of_shared_memory_are_refused_for_a_remote_daemon(options: Any) -> None:
    with pytest.raises(kvw.UsageError, match="unix://") as caught:
        kvw.connect("localhost:1", **options)
    assert caught.value.code == "unsupported"
