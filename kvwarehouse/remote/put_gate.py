"""Whether puts are worth trying: closed once the store refuses one or has no room for it, while
reads may go on. From then on one put every PROBE_EVERY_S is let through; one that is stored opens
it. What fails in another way is the breaker's.

Thread-safe; never blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvwarehouse.errors import TransportError

PROBE_EVERY_S: Final = 30.0

CLOSING_CODES: Final = ("remote_refused", "remote_full")


@dataclass(frozen=True)
class PutProblem:
    """`code`: one of CLOSING_CODES."""

    code: str
    text: str


class PutGate:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._problem: PutProblem | None = None
        self._probe_at = 0.0

    @property
    def problem(self) -> PutProblem | None:
        """Why it is closed."""
        with self._lock:
            return self._problem

    def admit(self) -> bool:
        """True where a put may be made. While it is closed, that puts off the next one."""
        with self._lock:
            if self._problem is None:
                return True
            now = self._clock()
            if now < self._probe_at:
                return False
            self._probe_at = now + PROBE_EVERY_S
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._problem = None

    def failed(self, error: TransportError) -> None:
        """Keeps its text and not the error: that holds what was put."""
        if error.code in CLOSING_CODES:
            with self._lock:
                self._problem = PutProblem(error.code, error.message)
                self._probe_at = self._clock() + PROBE_EVERY_S
