"""What systemd hears, by its protocol, over real datagram sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwarehouse.daemon.health import DaemonState, Lifecycle
from kvwarehouse.daemon.service_manager import ServiceManager


class Heard:
    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def all(self) -> list[dict[str, str]]:
        """Messages since the last call, as fields."""
        messages = []
        while True:
            try:
                text = self._socket.recv(4096).decode()
            except BlockingIOError:
                return messages
            messages.append(dict(line.split("=", 1) for line in text.split("\n")))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def heard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Heard]:
    path = str(tmp_path / "notify")
    heard = Heard(path if request.param == "path" else f"@kvw-test-{path[-80:]}")
    yield heard
    heard.close()


def test_states_of_a_daemon_are_told(heard: Heard) -> None:
    lifecycle = Lifecycle()
    lifecycle.listen(ServiceManager(heard.address).follow)
    for state in (DaemonState.SERVING, DaemonState.DRAINING):
        lifecycle.advance(state)
    lifecycle.resume()
    assert heard.all() == [
        {"READY": "1", "STATUS": "serving"},
        {"STATUS": "draining"},
        {"READY": "1", "STATUS": "serving"},
    ]


def test_long_start_and_end_ask_for_time(heard: Heard) -> None:
    manager = ServiceManager(heard.address)
    for _ in range(100):
        manager.start_goes_on()
    manager.stopping(30.0)
    start, *_, stop = heard.all()
    assert int(start["EXTEND_TIMEOUT_USEC"]) >= 10_000_000
    assert stop["STOPPING"] == "1"
    assert int(stop["EXTEND_TIMEOUT_USEC"]) > 30_000_000


def test_hundred_looks_in_a_moment_are_one_message(heard: Heard) -> None:
    now_s = 5.0
    manager = ServiceManager(heard.address, clock=lambda: now_s)
    for _ in range(100):
        manager.start_goes_on()
    assert len(heard.all()) == 1
    now_s += 1.0
    manager.start_goes_on()
    assert len(heard.all()) == 1


def test_reload_is_told_with_its_time(heard: Heard) -> None:
    manager = ServiceManager(heard.address)
    manager.reloading()
    manager.reloaded()
    begun, done = heard.all()
    assert begun["RELOADING"] == "1"
    assert int(begun["MONOTONIC_USEC"]) > 0
    assert done == {"READY": "1"}


@pytest.mark.parametrize(
    ("variables", "is_told"),
    [
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_USEC": "3000000"}, True),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({}, False),
    ],
)
def test_watchdog_hears_of_this_process_alone_what_it_asked_for(
    heard: Heard, variables: dict[str, str], is_told: bool
) -> None:
    environ = {"NOTIFY_SOCKET": heard.address, "OTHER": "stays", **variables}
    manager = ServiceManager.of_environment(environ)
    assert environ == {"OTHER": "stays"}  # no child speaks for the daemon
    manager.alive()
    assert heard.all() == ([{"WATCHDOG": "1"}] if is_told else [])


def test_nobody_waits_for_a_manager_that_reads_nothing_or_is_gone(heard: Heard) -> None:
    manager = ServiceManager(heard.address, watchdog=True)
    for _ in range(5000):  # more than a socket takes
        manager.alive()
    heard.close()
    manager.alive()
    ServiceManager().alive()
