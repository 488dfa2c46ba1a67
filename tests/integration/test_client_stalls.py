"""A daemon that stands still, a process that forks, threads that share a client: no call hangs, no
byte is wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse_bench.harness.eventually import eventually, longer_bounds

WAIT_S = 60
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=65536
)
TOKENS = range(40)


@pytest.fixture
def daemon() -> Iterator[PrivateDaemon]:
    with PrivateDaemon({"dram": "128MiB"}) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[kvw.Client]:
    with kvw.connect(daemon.address, timeout_s=WAIT_S) as client:
        yield client


@pytest.fixture
def short(client: kvw.Client) -> Iterator[kvw.Client]:
    """A client whose calls end soon where the daemon does not answer."""
    for bound_s in longer_bounds():
        try:
            short = kvw.connect(client.address, timeout_s=bound_s)
        except kvw.TransportError:  # so soon that a busy daemon does not come to it
            continue
        with short:
            yield short
        return


@pytest.fixture
def pages(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (10, 65536), dtype=np.uint8)


@contextmanager
def stalled(daemon: PrivateDaemon) -> Iterator[None]:
    os.kill(daemon.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.pid, os.WSTOPPED)  # the signal alone does not mean it has stopped
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_lookups_and_loads_of_dram_go_on_while_the_daemon_is_stalled(
    daemon: PrivateDaemon, client: kvw.Client, pages: Any
) -> None:
    ns = client.open(SPACE)
    ns.store(TOKENS, pages)
    out = np.zeros_like(pages)
    with stalled(daemon):
        assert ns.lookup(TOKENS).pages == 10
        assert ns.load(TOKENS, out, timeout_s=0.5) == 10
        assert ns.load(range(4000, 4040), out, timeout_s=0.5) == 0
        pins = ns.pin(TOKENS)
        assert pins.pages == 10
        pins.release()
    assert np.array_equal(ns_bytes(ns), pages)


def ns_bytes(ns: kvw.OpenNamespace) -> Any:
    out = np.zeros((10, 65536), np.uint8)
    assert ns.load(TOKENS, out) == 10
    return out


def test_calls_that_need_the_daemon_end_with_their_deadline_while_it_is_stalled(
    daemon: PrivateDaemon, client: kvw.Client, short: kvw.Client, pages: Any
) -> None:
    ns = client.open(SPACE)
    with stalled(daemon):
        for call in (
            lambda: ns.store(TOKENS, pages, timeout_s=0.3),
            short.status,
            lambda: short.clear(SPACE),
            lambda: client.flush(0.1),
            lambda: kvw.connect(daemon.address, timeout_s=0.3),
        ):
            with pytest.raises(kvw.TransportError):
                call()
    ns.store(TOKENS, pages, timeout_s=WAIT_S)
    assert np.array_equal(ns_bytes(ns), pages)


def test_load_from_nvme_runs_out_of_time_while_the_daemon_is_stalled(
    tmp_path: Path, pages: Any
) -> None:
    """Late is not gone: the reason says which, and the status counts the pages as it does."""
    (tmp_path / "nvme").mkdir(mode=0o700)
    settings = {"dram": "64MiB", "nvme_dir": str(tmp_path / "nvme"), "nvme_capacity": "128MiB"}
    with PrivateDaemon(settings) as daemon, kvw.connect(daemon.address, timeout_s=WAIT_S) as client:
        ns = client.open(SPACE)
        ns.store(TOKENS, pages)
        assert client.flush().pending == 0
        assert client.evict(SPACE, 10) == 10
        out = np.zeros_like(pages)
        with stalled(daemon):
            late = ns.load(TOKENS, out, timeout_s=0.3)
        assert (late, late.missed) == (0, {"timeout": 10})
        assert client.status()["core"]["loads"]["failed"]["timeout"] == 10
        assert ns.load(TOKENS, out, timeout_s=WAIT_S) == 10
        assert np.array_equal(out, pages)


FORKING = """
import os, sys
import numpy as np
import kvwarehouse as kvw
client = kvw.connect(sys.argv[1])
space = kvw.Namespace("m", "w", "uint8", "t/1", page_tokens=4, page_bytes=65536)
ns = client.open(space)
pages = np.full((10, 65536), 7, np.uint8)
assert ns.store(range(40), pages).stored == 10
pins = ns.pin(range(40))
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: ns.lookup(range(40)), lambda: ns.load(range(40), pages), client.status):
        try:
            call()
        except kvw.TransportError as error:
            refused += error.code == "forked"
    os._exit(refused)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 3, f"the child's client refused {status} of 3 calls"
client.evict(space, 10)
assert ns.lookup(range(40)).pages == 10, "the child took the parent's pins with it"
pages[:] = 0
assert ns.load(range(40), pages) == 10 and (pages == 7).all()
assert ns.store(range(100, 140), pages).stored == 10
"""


def test_forked_child_is_refused_and_its_parent_goes_on(daemon: PrivateDaemon) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FORKING, daemon.address],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_pins_hold_over_the_close_of_their_client_until_they_are_released(
    daemon: PrivateDaemon, client: kvw.Client, pages: Any
) -> None:
    """A device may be reading what they hold."""
    other = kvw.connect(daemon.address, timeout_s=WAIT_S)
    ns = other.open(SPACE)
    assert ns.store(TOKENS, pages, timeout_s=WAIT_S).stored == 10
    pins = ns.pin(TOKENS)
    assert pins.pages == 10
    other.close()
    watching = client.open(SPACE)
    assert client.evict(SPACE, 10) == 0
    assert watching.lookup(TOKENS).pages == 10
    pins.release()

    def gone() -> bool:
        client.evict(SPACE, 10)
        return watching.lookup(TOKENS).pages == 0

    eventually(gone, "the pages leave once the pins are released")


CLOSING = """
import os, signal, sys
import kvwarehouse as kvw
client = kvw.connect(sys.argv[1])
client.status()
# As other threads may hold them when the process forks.
with client._lock, client._channel._lock:
    child = os.fork()
    if child == 0:
        signal.alarm(int(sys.argv[2]))  # ends it where it hangs
        client.close()
        os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, f"closing the child's client ended with {status}"
assert client.status()["state"] == "serving"
client.close()
"""


def test_forked_child_closes_its_client_when_a_thread_held_its_locks(
    daemon: PrivateDaemon,
) -> None:
    """Incident: a child forked beside threads that used the client hung in close() for ever."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-P", "-c", CLOSING, daemon.address, str(WAIT_S)],
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.concurrency
def test_threads_that_share_a_client_load_what_each_of_them_stored(
    daemon: PrivateDaemon, seed: int
) -> None:
    """Prompts branch off one another, so that threads store the same pages at the same time."""
    failures: list[BaseException] = []

    def page_of(prefix: tuple[int, ...]) -> Any:
        return np.random.default_rng(abs(hash(prefix))).integers(0, 256, 65536, dtype=np.uint8)

    def work(number: int) -> None:
        rng = random.Random(f"{seed}:{number}")
        try:
            for _ in range(40):
                tokens = [t for _ in range(rng.randint(1, 6)) for t in [rng.randint(0, 2)] * 4]
                pages = [page_of(tuple(tokens[: 4 * n + 4])) for n in range(len(tokens) // 4)]
                ns.store(tokens, np.stack(pages))
                out = np.zeros((len(pages), 65536), np.uint8)
                filled = ns.load(tokens, out)
                for page in range(filled):
                    assert np.array_equal(out[page], pages[page])
        except BaseException as error:  # noqa: BLE001 - the thread's edge; raised below
            failures.append(error)

    with kvw.connect(daemon.address) as client:
        ns = client.open(SPACE)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        status = client.status()["core"]
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
    assert status["loads"]["failed"].get("mismatch", 0) == 0
