"""How many bytes of objects are in memory at a time. Those that wait are served in the order in
which they came, so that none is passed over. Thread-safe."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator


class BodyBudget:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._taken_bytes = 0

    @contextlib.contextmanager
    def taken(self, size_bytes: int, timeout_s: float) -> Iterator[bool]:
        """For as long as the block runs. False: there was no room within that time, and nothing is
        taken. What is larger than the whole budget has it when nobody else has any."""
        if not self._take(size_bytes, timeout_s):
            yield False
            return
        try:
            yield True
        finally:
            with self._changed:
                self._taken_bytes -= size_bytes
                self._changed.notify_all()

    def _take(self, size_bytes: int, timeout_s: float) -> bool:
        ticket = object()

        def turn() -> bool:
            fits = self._taken_bytes + size_bytes <= self._limit_bytes or self._taken_bytes == 0
            return fits and self._waiting[0] is ticket

        with self._changed:
            self._waiting.append(ticket)
            taken = self._changed.wait_for(turn, timeout_s)
            self._waiting.remove(ticket)
            if taken:
                self._taken_bytes += size_bytes
            self._changed.notify_all()  # whoever is behind may be next
            return taken
