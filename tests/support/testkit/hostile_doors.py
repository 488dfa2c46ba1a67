"""Everything that listens at a daemon, and what a hostile peer says there: what a good one says,
changed, torn, repeated and left unfinished. A visit is one connection; what it says follows from
its random numbers alone.

A door belongs to one thread; thread-safe beside others.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Self

from kvwarehouse import wire
from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_bench.micro.socket_session import EXCHANGE, SETTLE, message
from kvwarehouse_bench.strain import raw_protocols
from testkit.fuzz import changed
from testkit.fuzz_service import UNARY

_HEARS_S: Final = 0.02
"""How long an answer is waited for: what is hostile need not hear it."""
_LEFT_OPEN: Final = 4
"""Connections at a time that are neither used nor closed."""
_FLOOD: Final = 300
# Whoever may call may empty the warehouse or end its service with these, and nothing is checked
# then; requests of the first two are in fuzz_service.py.
_NOT_SENT: Final = ("Clear", "Evict", "Drain", "Sweep")

Say = Callable[[random.Random], list[bytes]]
"""Pieces of one conversation, in their order."""
Connect = Callable[[], socket.socket]


class Door:
    def __init__(self, connect: Connect, say: Say) -> None:
        self._connect, self._say = connect, say
        self._left_open: deque[socket.socket] = deque()

    def visit(self, rng: random.Random) -> int:
        """One connection. Returns how many pieces were said, whatever became of them."""
        pieces = [_worse(piece, rng) for piece in self._say(rng)]
        there = self._connect()
        there.settimeout(_HEARS_S)
        for piece in pieces:
            with contextlib.suppress(OSError):  # hung up on, or not read from
                there.sendall(piece)
                if rng.random() < 0.3:
                    there.recv(1 << 16)
        self._leave(there, rng)
        return len(pieces)

    def _leave(self, there: socket.socket, rng: random.Random) -> None:
        if rng.random() < 0.2:
            self._left_open.append(there)
            while len(self._left_open) > _LEFT_OPEN:
                self._left_open.popleft().close()
            return
        with there, contextlib.suppress(OSError):
            if rng.random() < 0.5:
                there.shutdown(socket.SHUT_WR)
                while there.recv(1 << 16):
                    pass

    def close(self) -> None:
        while self._left_open:
            self._left_open.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _worse(piece: bytes, rng: random.Random) -> bytes:
    how = rng.random()
    if how < 0.4:
        return piece
    if how < 0.8:
        return changed([piece], rng)
    if how < 0.9:
        return piece[: rng.randrange(len(piece) + 1)] or b"\0"
    return rng.randbytes(rng.choice((1, 9, 32, 1000, 70_000, 140_000)))


# --- where they are


def at_tcp(address: str) -> Connect:
    """ "127.0.0.1:port", as a host of its own, so that others of this host keep their shares."""
    host, _, port = address.rpartition(":")
    return lambda: socket.create_connection(
        (host, int(port)), DEADLINE_S, source_address=("127.0.0.2", 0)
    )


def at_unix(path: str, kind: int = socket.SOCK_STREAM) -> Connect:
    def connect() -> socket.socket:
        there = socket.socket(socket.AF_UNIX, kind)
        there.settimeout(DEADLINE_S)
        there.connect(path)
        return there

    return connect


# --- the local socket


class SessionDoor(Door):
    """Also sends descriptors along, which nobody asked for."""

    def __init__(self, path: str, namespace_id: bytes, corpus: Sequence[bytes]) -> None:
        super().__init__(at_unix(path, socket.SOCK_SEQPACKET), self._messages)
        self._namespace_id, self._corpus = namespace_id, corpus

    def _messages(self, rng: random.Random) -> list[bytes]:
        said = [message(1, bytes(16)) if rng.random() < 0.8 else b""]
        makers = (
            self._reserve, self._seal, self._settle, self._promote, self._report, self._bare,
            self._kept,
        )  # fmt: skip
        said += [rng.choice(makers)(rng) for _ in range(rng.randrange(12))]
        return [each for each in said if each]

    def _leave(self, there: socket.socket, rng: random.Random) -> None:
        if rng.random() < 0.3:
            pipe = os.pipe()
            with contextlib.suppress(OSError):
                socket.send_fds(there, [message(1, bytes(16))], [*pipe] * rng.choice((1, 20)))
            for each in pipe:
                os.close(each)
        super()._leave(there, rng)

    def _reserve(self, rng: random.Random) -> bytes:
        pages = rng.choice((1, 3, 40))
        body = b"".join(
            rng.randbytes(16) + bytes(16) + struct.pack("<IIII", 0, 0, 2, 16) + rng.randbytes(16)
            for _ in range(pages)
        )
        return message(EXCHANGE, self._namespace_id + body, (0, pages))

    def _seal(self, rng: random.Random) -> bytes:
        seals = b"".join(
            struct.pack("<QQII", rng.randrange(9), rng.getrandbits(64), rng.randrange(600), 0)
            for _ in range(20)
        )
        return message(EXCHANGE, self._namespace_id + seals, (20, 0))

    def _settle(self, rng: random.Random) -> bytes:
        refs = (struct.pack("<QII", rng.randrange(9), rng.randrange(600), 0) for _ in range(20))
        return message(SETTLE, b"".join(refs), (20, 0))

    def _promote(self, rng: random.Random) -> bytes:
        return message(7, rng.randbytes(16 * 30), (30, 0))

    def _report(self, rng: random.Random) -> bytes:
        where = struct.pack("<QII", rng.randrange(9), rng.randrange(600), 0)
        return message(9, rng.randbytes(16) + where, (1, 0))

    def _bare(self, rng: random.Random) -> bytes:
        return message(rng.choice((0, 2, 11, 12, 14, 999)), b"")

    def _kept(self, rng: random.Random) -> bytes:
        return rng.choice(self._corpus)


# --- gRPC


def grpc_said(corpus: Sequence[bytes], token: str = "") -> Say:
    """corpus: as fuzz_service.py has it, a method's number and a request."""
    methods = [f"/{wire.SERVICE_NAME}/{name}" for name, _ in UNARY]
    others = [
        f"/{wire.SERVICE_NAME}/Status", f"/{wire.SERVICE_NAME}/ListNamespaces",
        "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/no/such", "",
    ]  # fmt: skip
    requests = [
        (methods[each[0] % len(methods)], each[1:])
        for each in corpus
        if each and UNARY[each[0] % len(UNARY)][0] not in _NOT_SENT
    ] + [(method, b"") for method in others]

    def call(rng: random.Random, stream: int) -> Iterator[bytes]:
        method, request = rng.choice(requests)
        yield raw_protocols.call_head(stream, method, token)
        if rng.random() < 0.8:
            sent = changed([request], rng) if rng.random() < 0.5 else request
            yield raw_protocols.call_data(stream, sent, ends=rng.random() < 0.7)

    def said(rng: random.Random) -> list[bytes]:
        pieces = [raw_protocols.PREFACE + raw_protocols.frame(raw_protocols.SETTINGS, 0, 0)]
        for stream in range(1, 2 * rng.randint(1, 4), 2):
            pieces += call(rng, stream)
            if rng.random() < 0.4:
                pieces.append(_odd_frames(rng, stream))
        return pieces

    return said


def _odd_frames(rng: random.Random, stream: int) -> bytes:
    frames = (
        raw_protocols.frame(raw_protocols.PING, 0, 0, rng.randbytes(8)),
        raw_protocols.frame(
            raw_protocols.SETTINGS, 0, 0, struct.pack(">HI", rng.randint(0, 9), 2**31 - 1)
        ),
        raw_protocols.frame(
            raw_protocols.RST_STREAM, 0, stream, struct.pack(">I", rng.randint(0, 14))
        ),
        raw_protocols.frame(
            raw_protocols.WINDOW_UPDATE, 0, rng.choice((0, stream)), struct.pack(">I", 2**31 - 1)
        ),
        raw_protocols.frame(raw_protocols.PRIORITY, 0, stream, struct.pack(">IB", stream, 255)),
        raw_protocols.frame(raw_protocols.CONTINUATION, 0, stream, rng.randbytes(200)),
        raw_protocols.frame(raw_protocols.HEADERS, 0, stream + 2, rng.randbytes(200)),
        raw_protocols.frame(raw_protocols.DATA, 0, stream, b"\0\x7f\xff\xff\xff" + bytes(4000)),
        raw_protocols.frame(raw_protocols.GOAWAY, 0, 0, bytes(8)),
        # One that opens a call and takes it back, as often as it likes.
        raw_protocols.call_head(stream + 2, "/no/such")
        + raw_protocols.frame(raw_protocols.RST_STREAM, 0, stream + 2, struct.pack(">I", 8)),
    )
    return rng.choice(frames) * rng.choice((1, 1, 3, _FLOOD))


# --- HTTP


def http_said(rng: random.Random) -> list[bytes]:
    path = rng.choice(("/metrics", "/healthz", "/readyz", "/", "/../../etc/passwd", "/metrics?a=b"))
    method = rng.choice(("GET", "GET", "HEAD", "POST", "OPTIONS", "\0", "get"))
    request = f"{method} {path} HTTP/{rng.choice(('1.0', '1.1', '2', '9.9'))}\r\n".encode()
    fields = [b"Host: there\r\n", b"Connection: keep-alive\r\n", b"Content-Length: 999999\r\n",
              b"Transfer-Encoding: chunked\r\n", b"A: " + b"b" * 9000 + b"\r\n",
              b"X: \xff\xfe\r\n", b" folded\r\n", b"no colon\r\n", b"\n", b"\r"]  # fmt: skip
    head = [rng.choice(fields) for _ in range(rng.choice((0, 1, 3, 200)))]
    end = rng.choice((b"\r\n", b"\r\n", b"\n\n", b""))
    return [request, *(head if len(head) < 9 else [b"".join(head)]), end * rng.choice((1, 1, 50))]


# --- KV events


def zmtp_greeting(kind: bytes) -> tuple[bytes, bytes]:
    """What a peer of that kind says first, and then (rfc.zeromq.org/spec/23)."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return greeting, b"\x04" + bytes([len(ready)]) + ready


def kv_events_said(rng: random.Random) -> list[bytes]:
    """To the port of events, or of replays: both hear all of it."""
    kind = rng.choice((b"SUB", b"DEALER", b"REQ", b"PUB", b"NOTHING"))
    said = list(zmtp_greeting(kind))
    for _ in range(rng.randrange(8)):
        topic = rng.randbytes(rng.choice((0, 1, 200)))
        number = rng.choice((0, 1, 2**63, 2**64 - 1)).to_bytes(8, "big")
        said.append(
            rng.choice((
                b"\x00" + bytes([1 + len(topic)]) + b"\x01" + topic,  # subscribes
                b"\x00" + bytes([1 + len(topic)]) + b"\x00" + topic,  # and not
                b"\x01\x00\x00\x08" + number,  # asks for a replay
                b"\x01\x00" * rng.choice((1, 50, 3000)),  # parts without an end
                b"\x02" + (1 << rng.choice((10, 32, 62))).to_bytes(8, "big"),
                b"\x04\x06\x04PING\x00",
                b"\x04\x04\x03BYE",
            ))
        )  # fmt: skip
    return said
