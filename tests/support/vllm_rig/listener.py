"""A subscriber to the KV events that an engine publishes. One owner."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

_POLL_S = 0.2


class Listener:
    """socket: of the engine's publisher, by vLLM's default topic. Connects before the engine has
    started; what is published before vLLM has seen the subscription is not heard."""

    def __init__(self, socket: Path) -> None:
        import zmq

        self.endpoint = f"ipc://{socket}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(self.endpoint)

    def options(self) -> dict[str, Any]:
        """kv_events_config of the engine."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
        }

    def heard(self, quiet_s: float = 1.0) -> list[Any]:
        """Events, in their order, until none has come for so long. On a busy machine that says
        nothing of what is to come: who waits for an event asks again."""
        found: list[Any] = []
        end = time.monotonic() + quiet_s
        while time.monotonic() < end:
            if self._socket.poll(_POLL_S * 1e3):
                found += self._batch()
                end = time.monotonic() + quiet_s
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _batch(self) -> list[Any]:
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        _, _, payload = self._socket.recv_multipart()
        return list(msgspec.msgpack.decode(payload, type=KVEventBatch).events)
