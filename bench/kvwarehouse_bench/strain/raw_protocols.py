"""Protocols by hand, for what no client of ours and no library does, and memory that another
process has mapped. One owner; not thread-safe.

HTTP/2 and gRPC frames (RFC 9113, RFC 7541). A session of the local socket (layouts of
native/exchange/messages.h): grants that are never sealed, messages as fast as they can be sent. The
words and metadata of a daemon's slots (native/slots/slots.h), to be looked at and damaged while it
runs.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_bench.micro.socket_session import EXCHANGE, HEAD, SETTLE, SocketSession, message

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4

_REPORT: Final = 9
_ENGINE_KEY: Final = 2  # WitnessKind
_ANSWER: Final = struct.Struct("<QIIII")
GRANTED: Final = 0

RESERVED: Final = 1
FILLING: Final = 2
LIVE: Final = 3

_HEADER: Final = struct.Struct("<QIIQQQQQQQQQ")
_CUTS_AT: Final = 4096
_KEY_AT: Final = 24


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def call_head(stream: int, method: str, token: str = "") -> bytes:
    """Opens a call of gRPC: "/service/method"."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": method, ":authority": "there",
        "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    if token:
        fields["authorization"] = f"Bearer {token}"
    block = b"".join(
        b"\0" + _text(name.encode()) + _text(value.encode()) for name, value in fields.items()
    )
    return frame(HEADERS, END_HEADERS, stream, block)


def call_data(stream: int, message: bytes, *, ends: bool = True) -> bytes:
    """A whole message of a call."""
    prefixed = b"\0" + len(message).to_bytes(4, "big") + message
    return frame(DATA, END_STREAM if ends else 0, stream, prefixed)


def _text(value: bytes) -> bytes:
    """As a literal; shorter than 127 bytes."""
    return bytes([len(value)]) + value


@dataclass(frozen=True)
class Grant:
    key: bytes
    generation: int
    slot: int


class RawSession(SocketSession):
    """Blocks for a daemon that does not answer for a minute, then raises TimeoutError."""

    def __init__(self, path: str) -> None:
        super().__init__(path, DEADLINE_S)

    def reserve(self, namespace_id: bytes, keys: Sequence[bytes]) -> list[Grant]:
        """Shard 0 of pages that stand alone, of 16-byte keys: those that were granted."""
        body = b"".join(
            key + bytes(16) + struct.pack("<IIII", 0, 0, _ENGINE_KEY, len(key)) + key
            for key in keys
        )
        said = self._ask(EXCHANGE, namespace_id + body, second=len(keys))
        answers = [_ANSWER.unpack_from(said, at * _ANSWER.size) for at in range(len(keys))]
        return [
            Grant(key, generation, slot)
            for key, (generation, slot, answer, _, _) in zip(keys, answers, strict=True)
            if answer == GRANTED
        ]

    def seal(self, namespace_id: bytes, grants: Sequence[Grant]) -> None:
        """Without having written anything: with a digest of nothing."""
        seals = (struct.pack("<QQII", each.generation, 1, each.slot, 0) for each in grants)
        self._ask(EXCHANGE, namespace_id + b"".join(seals), first=len(grants))

    def settle(self, grants: Sequence[Grant]) -> None:
        refs = (struct.pack("<QII", each.generation, each.slot, 0) for each in grants)
        self._ask(SETTLE, b"".join(refs), first=len(grants))

    def report(self, page: Grant) -> None:
        """That its bytes are not what its header says, whatever they are."""
        self._ask(_REPORT, page.key + struct.pack("<QII", page.generation, page.slot, 0))

    def _ask(self, kind: int, body: bytes, *, first: int = 0, second: int = 0) -> bytes:
        """What the reply has behind its head."""
        reply = self.ask(message(kind, body, (first, second)))
        content = reply[HEAD.itemsize :]
        answered = int(np.frombuffer(reply, HEAD, 1)[0]["f2"]) if reply else 0
        assert answered == kind + 1, f"asked {kind}, answered {answered}: {content!r}"
        return content


class SlotsFile:
    def __init__(self, path: Path) -> None:
        """Of a daemon that has been started."""
        self._bytes = np.memmap(path, np.uint8, "r+")
        header = _HEADER.unpack(self._bytes[: _HEADER.size].tobytes())
        slabs, self._per_slab, self._region, words, self._metas = header[2], *header[6:10]
        self._words = self._bytes[words : words + 8 * slabs * self._per_slab].view(np.uint64)
        self._cuts = self._bytes[_CUTS_AT : _CUTS_AT + 8 * slabs].view(np.uint64)

    def slots(self, *states: int) -> list[int]:
        """Those that are in one of the states now."""
        found: list[int] = np.flatnonzero(np.isin(self._words & np.uint64(0xFFFF), states)).tolist()
        return found

    def generation(self, slot: int) -> int:
        return int(self._words[slot]) >> 16

    def key(self, slot: int) -> bytes:
        at, _ = self._meta(slot)
        return bytes(self._bytes[at + _KEY_AT : at + _KEY_AT + 16])

    def flip(self, slot: int, rng: random.Random) -> None:
        """One bit of its metadata."""
        at, size_bytes = self._meta(slot)
        self._bytes[at + rng.randrange(size_bytes)] ^= np.uint8(1 << rng.randrange(8))

    def _meta(self, slot: int) -> tuple[int, int]:
        slab, place = divmod(slot, self._per_slab)
        size_bytes = 64 * (int(self._cuts[slab]) >> 32 & 0xFFFF)
        return self._metas + slab * self._region + place * size_bytes, size_bytes
