"""A session that speaks the local socket's messages itself, for what no client of ours does: grants
that are never sealed, messages as fast as they can be sent. Layouts of native/exchange/messages.h.

One owner; not thread-safe.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvwarehouse_bench.harness.until import DEADLINE_S
from kvwarehouse_bench.micro.socket_session import EXCHANGE, HEAD, SETTLE, SocketSession, message

_REPORT: Final = 9
_ENGINE_KEY: Final = 2  # WitnessKind
_ANSWER: Final = struct.Struct("<QIIII")
GRANTED: Final = 0


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
