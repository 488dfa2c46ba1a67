"""A subscriber of KV events, as a router has one: a SUB socket for what happens, a DEALER socket
for what was missed, and the blocks that follow from both. One owner; not thread-safe.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any, Self

import msgpack
import zmq

_NUMBER = struct.Struct(">Q")
_END = struct.pack(">q", -1)
_REPLAY_S = 20.0


class KvSubscriber:
    """`blocks`: hash to the media that have it. `problems`: what no stream should ever say."""

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = "") -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._sub.setsockopt(zmq.RECONNECT_IVL, 20)
        self._sub.connect(endpoint)
        self._dealer: Any = None
        if replay_endpoint:
            self._dealer = self._context.socket(zmq.DEALER)
            self._dealer.setsockopt(zmq.RECONNECT_IVL, 20)
            self._dealer.connect(replay_endpoint)
        self.blocks: dict[int, set[str]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.last: int | None = None
        self.topics: set[bytes] = set()
        self._thrown_away = 0  # the highest number of them
        self.gaps = self.replayed = self.clears = 0
        self.problems: list[str] = []

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self, timeout_s: float = 0.05) -> int:
        """Applies what has come, waiting at most so long for the first message. How many came."""
        count = 0
        while self._sub.poll(int(timeout_s * 1000) if count == 0 else 0):
            topic, number, payload = self._sub.recv_multipart()
            self.topics.add(topic)
            self._heard(_NUMBER.unpack(number)[0], payload)
            count += 1
        return count

    def drop(self) -> int:
        """Throws away what has come, as a subscriber that was too slow. How many messages it has
        missed since the last that it knows, which there has to be; an idle stream says the last of
        them again, and a replay has said some already."""
        assert self.last is not None
        while self._sub.poll(0):
            _, number, _ = self._sub.recv_multipart()
            self._thrown_away = max(self._thrown_away, _NUMBER.unpack(number)[0])
        return max(0, self._thrown_away - self.last)

    def ask(self, start: int) -> None:
        """Applies what the replay endpoint says from `start` on."""
        for number, payload in self.replay(start):
            self._apply(payload)
            self.last = number
            self.replayed += 1

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        self._dealer.send_multipart([b"", _NUMBER.pack(start)])
        while True:
            assert self._dealer.poll(int(_REPLAY_S * 1000)), "no answer to a replay request"
            empty, number, payload = self._dealer.recv_multipart()
            assert empty == b""
            if number == _END:
                assert payload == b""
                return
            yield _NUMBER.unpack(number)[0], payload

    def _heard(self, number: int, payload: bytes) -> None:
        if self.last is None or number > self.last + 1:
            self.gaps += 1
            if self._dealer is not None:
                self.ask(0 if self.last is None else self.last + 1)
        if self.last is None or number > self.last:
            self._apply(payload)
            self.last = number

    def _apply(self, payload: bytes) -> None:
        _, events, _ = msgpack.unpackb(payload)
        for event in events:
            if event[0] == "AllBlocksCleared":
                self.blocks.clear()
                self.clears += 1
            elif event[0] == "BlockStored":
                self._store(event)
            else:
                for block in event[1]:
                    self._remove(block, event[2])

    def _store(self, event: list[Any]) -> None:
        _, hashes, parent, tokens, size, _, medium, _ = event
        if len(tokens) != size * len(hashes):
            self.problems.append(f"{len(tokens)} tokens for {len(hashes)} blocks of {size}")
        if parent is not None and parent not in self.blocks:
            self.problems.append(f"block {hashes[0]} came before its parent {parent}")
        for place, block in enumerate(hashes):
            self.blocks.setdefault(block, set()).add(medium)
            self.tokens[block] = tokens[place * size : (place + 1) * size]

    def _remove(self, block: int, medium: str) -> None:
        media = self.blocks.get(block, set())
        media.discard(medium)
        if not media:
            self.blocks.pop(block, None)


class LossyRelay:
    """A wire between publisher and subscriber that can be cut: what is published meanwhile is lost,
    as on a network that fails or to a subscriber that is too slow. From the PUB socket at `source`
    to one at `endpoint`, until close(); a thread of its own."""

    def __init__(self, source: str, endpoint: str) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(source)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(endpoint)
        self.cut = threading.Event()
        self.lost = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            if not self._sub.poll(50):
                continue
            frames = self._sub.recv_multipart()
            if self.cut.is_set():
                self.lost += 1
            else:
                self._pub.send_multipart(frames)

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._context.destroy(linger=0)
