"""How fast the store gives objects: bytes a second while any come, and the time until the first one
of each. Loads are weighed against computing by it.

What was measured a while ago is forgotten: where it was bad nobody would read, and it would stay so
for ever. Thread-safe; never blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

FORGOTTEN_S: Final = 60.0

_KEPT: Final = 0.8
"""Of what was measured before, with each look that has something new."""
_OF_NEW_FIRST_BYTE: Final = 1 / 8


@dataclass(frozen=True)
class ReadFigures:
    """0: not known."""

    bytes_per_s: int
    first_byte_s: float


class ReadRates:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._coming = 0  # bodies, now
        self._since_s = 0.0  # `_coming` is what it is, while there are any
        self._new_bytes, self._new_s = 0, 0.0  # since the last look
        self._bytes, self._s = 0.0, 0.0
        self._first_byte_s = 0.0
        self._measured_s = -FORGOTTEN_S

    def begin(self) -> ReadTime:
        """A read that begins now."""
        return ReadTime(self, self._clock())

    def figures(self) -> ReadFigures:
        """Called about once a second."""
        with self._lock:
            now = self._clock()
            self._count_time(now)
            if self._new_bytes and self._new_s > 0:
                self._bytes = _KEPT * self._bytes + self._new_bytes
                self._s = _KEPT * self._s + self._new_s
                self._new_bytes, self._new_s = 0, 0.0
            if now - self._measured_s > FORGOTTEN_S:
                self._bytes = self._s = self._first_byte_s = 0.0
            rate = self._bytes / self._s if self._s > 0 else 0.0
            return ReadFigures(round(rate), self._first_byte_s)

    def _first_byte(self, after_s: float) -> None:
        with self._lock:
            self._count_time(self._clock())
            self._coming += 1
            known = self._first_byte_s
            self._first_byte_s = (
                known + (after_s - known) * _OF_NEW_FIRST_BYTE if known else after_s
            )

    def _ended(self, size_bytes: int) -> None:
        with self._lock:
            self._count_time(self._clock())
            self._coming -= 1
            self._new_bytes += size_bytes
            self._measured_s = self._clock()

    def _count_time(self, now: float) -> None:
        if self._coming:
            self._new_s += now - self._since_s
        self._since_s = now


class ReadTime:
    """Of one read; one thread's."""

    def __init__(self, rates: ReadRates, began_s: float) -> None:
        self._rates, self._began_s = rates, began_s
        self._comes = False

    def first_byte(self) -> None:
        """It is there, the others come."""
        self._comes = True
        self._rates._first_byte(self._rates._clock() - self._began_s)

    def end(self, size_bytes: int = 0) -> None:
        """So many came."""
        if self._comes:
            self._rates._ended(size_bytes)
