"""A session on the daemon's local socket that only reserves and seals, and copies nothing: what an
exchange costs without the copies of a store. Layouts of native/exchange/messages.h.

Not thread-safe. What it seals are pages of whatever the slots hold: they are for nobody to load,
and the caller clears their namespace.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.errors import TransportError, WarehouseError
from kvwarehouse_bench.micro.options import PAGE_TOKENS

_MAGIC, _VERSION = 0x3157564B, 1
_HELLO, EXCHANGE, _EXCHANGED, SETTLE = 1, 3, 4, 5
_GRANTED = 0
_TOKENS_WITNESS = 1
MESSAGE_BYTES = 128 << 10
_DESCRIPTORS = 5
_TIMEOUT_S = 20.0

HEAD = np.dtype("u4,u2,u2,u8,u4,u4,u4,u4")
_SEAL = np.dtype([("generation", "u8"), ("digest", "u8"), ("slot", "u4"), ("shard", "u4")])
_RESERVE = np.dtype(
    [
        ("key", "V16"),
        ("parent", "V16"),
        ("position", "u4"),
        ("shard", "u4"),
        ("witness_kind", "u4"),
        ("witness_bytes", "u4"),
        ("witness", "u4", PAGE_TOKENS),
    ]
)
_RESERVED = np.dtype(
    [("generation", "u8"), ("slot", "u4"), ("answer", "u4"), ("reason", "u4"), ("spare", "u4")]
)


@dataclass(frozen=True)
class Granted:
    """Slots of an exchange, to be sealed in the next."""

    slots: NDArray[Any]

    def __len__(self) -> int:
        return len(self.slots)


NONE_GRANTED = Granted(np.zeros(0, _RESERVED))


def message(kind: int, body: bytes, counts: tuple[int, int] = (0, 0)) -> bytes:
    head = np.zeros(1, HEAD)
    head[0] = (_MAGIC, _VERSION, kind, 1, HEAD.itemsize + len(body), *counts, 0)
    return head.tobytes() + body


def reservations(keys: NDArray[np.uint8], tokens: NDArray[np.uint32]) -> NDArray[Any]:
    """Of one prompt from its root; keys: (pages, 16), as engine.chain_keys makes them."""
    made = np.zeros(len(keys), _RESERVE)
    made["key"] = keys.copy().view("V16").reshape(-1)
    made["parent"][1:] = made["key"][:-1]
    made["position"] = np.arange(len(keys))
    made["witness_kind"] = _TOKENS_WITNESS
    made["witness_bytes"] = 4 * PAGE_TOKENS
    made["witness"] = tokens.reshape(len(keys), PAGE_TOKENS)
    return made


def exchange_message(space_id: bytes, granted: Granted, reserved: NDArray[Any]) -> bytes:
    seals = np.zeros(len(granted), _SEAL)
    seals["generation"] = granted.slots["generation"]
    seals["slot"] = granted.slots["slot"]
    body = space_id + seals.tobytes() + reserved.tobytes()
    return message(EXCHANGE, body, (len(granted), len(reserved)))


class SocketSession:
    def __init__(self, path: str, timeout_s: float = _TIMEOUT_S) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._held: list[int] = []
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
            self._socket.send(message(_HELLO, bytes(16)))
            # The last one is the session's file: as long as it is open, the session lives.
            _, self._held, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, _DESCRIPTORS)
        except BaseException:
            self.close()
            raise
        if len(self._held) != _DESCRIPTORS:
            self.close()
            raise TransportError("the daemon did not answer the bench's hello", code="daemon_gone")

    def ask(self, request: bytes) -> bytes:
        """One round trip: what is measured."""
        self._socket.send(request)
        return self._socket.recv(MESSAGE_BYTES)

    def give_back(self, slots: Granted) -> None:
        """What will not be sealed any more."""
        seals = np.zeros(len(slots), np.dtype("u8,u4,u4"))
        seals["f0"], seals["f1"] = slots.slots["generation"], slots.slots["slot"]
        self.ask(message(SETTLE, seals.tobytes(), (len(slots), 0)))

    def close(self) -> None:
        self._socket.close()
        for descriptor in self._held:
            os.close(descriptor)
        self._held = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def exchange_bytes(pages: int) -> tuple[int, int]:
    """Of a request that seals and reserves so many, and of its reply."""
    head, key = HEAD.itemsize, 16
    request = head + key + pages * (_SEAL.itemsize + _RESERVE.itemsize)
    return request, head + _sealed_bytes(pages) + pages * _RESERVED.itemsize


def granted_by(reply: bytes, seals: int) -> Granted:
    """Of a reply in which all was taken and granted; anything else is an error."""
    head = np.frombuffer(reply, HEAD, 1)[0] if len(reply) >= HEAD.itemsize else None
    if head is None or head["f2"] != _EXCHANGED:
        said = reply[HEAD.itemsize :].replace(b"\0", b" ").decode("utf-8", "replace")
        raise WarehouseError(f"the daemon refused the bench's exchange: {said or 'it hung up'}")
    begin = HEAD.itemsize
    reasons = np.frombuffer(reply, "u4", seals, begin)
    begin += _sealed_bytes(seals)
    answers = np.frombuffer(reply, _RESERVED, int(head["f6"]), begin)
    refused = int(np.count_nonzero(reasons)) + int(np.count_nonzero(answers["answer"] != _GRANTED))
    if refused:
        raise WarehouseError(
            f"{refused} of the bench's {seals} seals and {len(answers)} reservations were refused:"
            " the warehouse has other work, or no room"
        )
    return Granted(answers)


def _sealed_bytes(seals: int) -> int:
    """Four bytes each, padded to eight."""
    return (4 * seals + 7) // 8 * 8
