"""Connections at the TCP address: of a host beyond its half, and of all hosts together, those are
ended that have shown no token, the oldest first."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvwarehouse.daemon import admission
from kvwarehouse.daemon.admission import Connections, Refusals
from kvwarehouse.daemon.logs import Log
from kvwarehouse_bench.harness.eventually import DEADLINE_S

MAX = 8


class Port:
    """Takes connections as gRPC does."""

    def __init__(self, stack: ExitStack, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._stack = stack
        self._listener = stack.enter_context(
            socket.create_server((address, 0), family=family, dualstack_ipv6=address == "::")
        )
        self.log = io.StringIO()
        self.refusals = Refusals(Log("json", self.log))
        self.connections = Connections(Log("json", self.log), self.refusals)
        self.connections.port = self._listener.getsockname()[1]

    def connect(self, host: str) -> tuple[socket.socket, str]:
        """One from this address of the host, with what gRPC calls it."""
        there = self._stack.enter_context(self._socket_at(host))
        there.settimeout(DEADLINE_S)
        there.connect(("::1" if ":" in host else "127.0.0.1", self.connections.port))
        self._stack.enter_context(self._listener.accept()[0])
        name, port = there.getsockname()[:2]
        return there, f"ipv6:%5B{name}%5D:{port}" if ":" in host else f"ipv4:{name}:{port}"

    def _socket_at(self, host: str) -> socket.socket:
        """The kernel may choose the port's own number for another address of the host. Both ends
        are of this process, so this one would count as a connection of the port, which a client
        of a daemon cannot be."""
        while True:
            there = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            there.bind((host, 0))
            if there.getsockname()[1] != self.connections.port:
                return there
            there.close()


@contextmanager
def port_at(address: str) -> Iterator[Port]:
    with ExitStack() as stack:
        yield Port(stack, address)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    monkeypatch.setattr(admission, "CONNECTIONS_MAX", MAX)
    with port_at("127.0.0.1") as port:
        yield port


def ended(there: socket.socket) -> bool:
    there.setblocking(False)
    try:
        return there.recv(1) == b""
    except BlockingIOError:
        return False


def test_oldest_without_a_token_are_ended_beyond_a_hosts_half(port: Port) -> None:
    here = []
    for _ in range(6):
        here.append(port.connect("127.0.0.2")[0])
        if len(here) <= 4:
            port.connections.look()  # it sees in which order they come
    other, name = port.connect("127.0.0.3")
    port.connections.called(name)
    port.connections.look()
    assert [ended(each) for each in here] == [True] * 2 + [False] * 4
    assert not ended(other)
    assert port.connections.count == 5
    assert port.refusals.counts["too_many_connections"] == 2


def test_those_with_a_token_stay_before_those_without(port: Port) -> None:
    called = [port.connect("127.0.0.2") for _ in range(3)]
    for _, name in called:
        port.connections.called(name)
    port.connections.look()
    silent = [port.connect("127.0.0.2")[0] for _ in range(5)]
    port.connections.look()
    assert not any(ended(there) for there, _ in called)
    assert sum(ended(there) for there in silent) == 4


def test_those_without_a_token_have_half_together_whatever_address_they_call_from(
    port: Port,
) -> None:
    """Incident: a user without a token called from two addresses of loopback and held every place
    of the daemon's port, two halves of it."""
    called = [port.connect(host) for host in ("127.0.0.2", "127.0.0.1")]
    for _, name in called:
        port.connections.called(name)
    silent = []
    for number in range(6):
        silent.append(port.connect(f"127.0.0.{2 + number % 3}")[0])
        if number < 4:
            port.connections.look()  # it sees in which order they come
    port.connections.look()
    assert [ended(each) for each in silent] == [True] * 2 + [False] * 4
    assert not any(ended(there) for there, _ in called)
    assert port.connections.count == 6
    assert port.refusals.counts["too_many_connections"] == 2


def test_newest_with_a_token_are_ended_where_all_have_one(port: Port) -> None:
    here = []
    for _ in range(6):
        there, name = port.connect("127.0.0.2")
        port.connections.called(name)
        if len(here) < 4:
            port.connections.look()
        here.append(there)
    port.connections.look()
    assert [ended(each) for each in here] == [False] * 4 + [True] * 2


def test_token_is_forgotten_with_its_connection(port: Port) -> None:
    _, name = port.connect("127.0.0.2")
    port.connections.called(name)
    port.connections.look()
    assert len(port.connections._called) == 1
    port._stack.close()
    port.connections.look()
    assert port.connections.count == 0
    assert not port.connections._called


def test_tokens_are_known_by_both_families_of_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    monkeypatch.setattr(admission, "CONNECTIONS_MAX", MAX)
    with port_at("::") as port:
        for host in ("::1", "127.0.0.1"):
            silent = [port.connect(host)[0] for _ in range(3)]
            there, name = port.connect(host)
            port.connections.called(name)
            silent.append(port.connect(host)[0])
            port.connections.look()
            assert sum(ended(each) for each in silent) == 1
            assert not ended(there)


def test_what_is_no_connection_of_the_port_is_left_alone(port: Port) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ExitStack() as stack:
        for _ in range(MAX):
            there = socket.create_connection(other.getsockname(), DEADLINE_S)
            stack.enter_context(there)
            stack.enter_context(other.accept()[0])
        port.connections.look()
        assert port.connections.count == 0
        assert not ended(there)


def test_crowd_is_told_once(port: Port) -> None:
    for host in ("127.0.0.2", "127.0.0.3"):
        assert not port.connections.crowded
        for _ in range(4):
            port.connect(host)
    for _ in range(3):
        port.connections.look()
    assert port.connections.count == MAX // 2  # of those without a token
    assert port.connections.crowded
    lines = [json.loads(line) for line in port.log.getvalue().splitlines()]
    assert [(line["event"], line["count"]) for line in lines] == [("connections_near_bound", 8)]
