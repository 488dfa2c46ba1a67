"""A session that speaks the local socket's messages itself (native/exchange/messages.h), for what
no client of ours does: grants that are never sealed, messages as fast as they can be sent.

One owner; not thread-safe.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from kvwarehouse.testing.until import DEADLINE_S

_HEAD: Final = struct.Struct("<IHHQIIII")
_MAGIC: Final = 0x3157564B
_HELLO, _EXCHANGE, _SETTLE, _REPORT = 1, 3, 5, 9
_ENGINE_KEY: Final = 2  # WitnessKind
_ANSWER: Final = struct.Struct("<QIIII")
_MOST_BYTES: Final = 128 << 10
_DESCRIPTORS: Final = 16
GRANTED: Final = 0


@dataclass(frozen=True)
class Grant:
    key: bytes
    generation: int
    slot: int


class RawSession:
    """Blocks for a daemon that does not answer for a minute, then raises TimeoutError."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(path)
        self._requests = 0
        self._fds = array.array("i")
        self._ask(_HELLO, struct.pack("<QQ", 0, os.getpid()))

    def reserve(self, namespace_id: bytes, keys: Sequence[bytes]) -> list[Grant]:
        """Shard 0 of pages that stand alone, of 16-byte keys: those that were granted."""
        body = b"".join(
            key + bytes(16) + struct.pack("<IIII", 0, 0, _ENGINE_KEY, len(key)) + key
            for key in keys
        )
        said = self._ask(_EXCHANGE, namespace_id + body, second=len(keys))
        answers = [_ANSWER.unpack_from(said, at * _ANSWER.size) for at in range(len(keys))]
        return [
            Grant(key, generation, slot)
            for key, (generation, slot, answer, _, _) in zip(keys, answers, strict=True)
            if answer == GRANTED
        ]

    def seal(self, namespace_id: bytes, grants: Sequence[Grant]) -> None:
        """Without having written anything: with a digest of nothing."""
        seals = (struct.pack("<QQII", each.generation, 1, each.slot, 0) for each in grants)
        self._ask(_EXCHANGE, namespace_id + b"".join(seals), first=len(grants))

    def settle(self, grants: Sequence[Grant]) -> None:
        refs = (struct.pack("<QII", each.generation, each.slot, 0) for each in grants)
        self._ask(_SETTLE, b"".join(refs), first=len(grants))

    def report(self, page: Grant) -> None:
        """That its bytes are not what its header says, whatever they are."""
        self._ask(_REPORT, page.key + struct.pack("<QII", page.generation, page.slot, 0))

    def close(self) -> None:
        self._socket.close()
        for fd in self._fds:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, kind: int, body: bytes, *, first: int = 0, second: int = 0) -> bytes:
        """What the reply has behind its head."""
        self._requests += 1
        size = _HEAD.size + len(body)
        self._socket.send(
            _HEAD.pack(_MAGIC, 1, kind, self._requests, size, first, second, 0) + body
        )
        room = socket.CMSG_SPACE(_DESCRIPTORS * self._fds.itemsize)
        said, passed, _, _ = self._socket.recvmsg(_MOST_BYTES, room)
        for _, _, fds in passed:  # the session's lock among them
            self._fds.frombytes(fds)
        answered = _HEAD.unpack_from(said)[2] if said else 0
        assert answered == kind + 1, f"asked {kind}, answered {answered}: {said[_HEAD.size :]!r}"
        return said[_HEAD.size :]
