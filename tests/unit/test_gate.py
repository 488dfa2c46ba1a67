"""The gate before a ZeroMQ port carries bytes both ways, and bounds what each peer may cost."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvwarehouse.daemon import gate
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_bench.harness.process import free_port


class Guarded:
    """A gate, and the socket behind it, which this is."""

    def __init__(self, folder: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "inner"))
        self.listener.listen()
        self.listener.settimeout(DEADLINE_S)
        self.port = free_port()
        self.gate = gate.Gate(f"127.0.0.1:{self.port}", str(folder / "inner"))

    def connect(self, host: str = "127.0.0.1") -> socket.socket:
        there = ("127.0.0.1", self.port)
        return socket.create_connection(there, DEADLINE_S, source_address=(host, 0))

    def accept(self) -> socket.socket:
        there, _ = self.listener.accept()
        there.settimeout(DEADLINE_S)
        return there

    def close(self) -> None:
        self.gate.close()
        self.listener.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path)
    yield made
    made.close()


def ended(there: socket.socket) -> bool:
    with suppress(ConnectionError):
        while there.recv(1 << 16):
            pass
    return True


def heard(there: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = there.recv(size - len(got))
        assert more, f"{len(got)} bytes of {size}"
        got += more
    return got


def test_bytes_are_carried_both_ways_however_slowly_they_are_read(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "STALL_S", DEADLINE_S)
    text = bytes(range(256)) * (32 << 12)  # more than the kernel keeps
    with guarded.connect() as outer, guarded.accept() as inner:
        outer.sendall(b"hello")
        assert heard(inner, 5) == b"hello"
        inner.settimeout(0.2)
        sent = 0
        with suppress(TimeoutError):
            while sent < len(text):
                sent += inner.send(text[sent:])
        assert sent < len(text), "the gate keeps little itself"
        assert heard(outer, sent) == text[:sent]
        outer.sendall(b"again")
        assert heard(inner, 5) == b"again"
        inner.settimeout(DEADLINE_S)
        inner.sendall(text[:1000])
        assert heard(outer, 1000) == text[:1000]
    assert guarded.gate.ended == 0


def test_end_of_one_side_is_the_end_of_the_other(guarded: Guarded) -> None:
    with guarded.connect() as outer:
        guarded.accept().close()
        assert ended(outer)
    with guarded.connect() as outer, guarded.accept() as inner:
        outer.close()
        assert ended(inner)


def test_peer_that_says_too_much_is_ended(guarded: Guarded) -> None:
    with guarded.connect() as outer, guarded.accept() as inner:
        outer.sendall(bytes(gate.SAID_BYTES))
        assert heard(inner, gate.SAID_BYTES)
        with suppress(ConnectionError):
            outer.sendall(b"x")
        assert ended(outer)
        assert inner.recv(1) == b""
    assert guarded.gate.ended == 1


def test_peer_that_does_not_read_is_ended(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "STALL_S", 0.2)
    with guarded.connect(), guarded.accept() as inner, suppress(ConnectionError):
        while True:
            inner.sendall(bytes(1 << 16))
    eventually(lambda: guarded.gate.ended == 1, "it is counted")


def test_peer_beyond_the_bound_is_closed_and_finds_room_once_another_left(guarded: Guarded) -> None:
    with ExitStack() as stack:
        first, inner = [], []
        for host in ("127.0.0.1", "127.0.0.2"):  # each has half
            for _ in range(gate.PEERS_MAX // 2):
                first.append(stack.enter_context(guarded.connect(host)))
                inner.append(stack.enter_context(guarded.accept()))
            assert ended(stack.enter_context(guarded.connect(host)))
        assert ended(stack.enter_context(guarded.connect("127.0.0.3")))
        assert guarded.gate.ended == 3
        first[0].close()
        assert ended(inner[0])
        stack.enter_context(guarded.connect()).sendall(b"hello")
        assert heard(stack.enter_context(guarded.accept()), 5) == b"hello"


def test_peer_is_closed_where_nobody_is_behind_the_gate(guarded: Guarded) -> None:
    guarded.listener.close()
    with guarded.connect() as outer:
        assert ended(outer)
