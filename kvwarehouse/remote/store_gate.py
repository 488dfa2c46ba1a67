"""Whether calls of one kind, puts or gets, are worth trying: closed once the store refuses one or
has no room for it, while other kinds may go on. From then on one call every PROBE_EVERY_S is let
through; one that succeeds opens it. What fails in another way is the breaker's.

Thread-safe; never blocks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvwarehouse.errors import TransportError

PROBE_EVERY_S: Final = 30.0

CLOSING_CODES: Final = ("remote_refused", "remote_full")


@dataclass(frozen=True)
class StoreProblem:
    """`code`: one of CLOSING_CODES."""

    code: str
    text: str


class StoreGate:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._problem: StoreProblem | None = None
        self._probe_at = 0.0

    @property
    def problem(self) -> StoreProblem | None:
        """Why it is closed."""
        with self._lock:
            return self._problem

    def admit(self) -> bool:
        """True where a call may be made. While it is closed, that puts off the next one."""
        with self._lock:
            if self._problem is None:
                return True
            now = self._clock()
            if now < self._probe_at:
                return False
            self._probe_at = now + PROBE_EVERY_S
            return True

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """One call: it hears how that ends. Where none is let through, it raises what closed it."""
        if not self.admit():
            problem = self.problem
            if problem is not None:
                raise TransportError(problem.text, code=problem.code)
        try:
            yield
        except TransportError as error:
            self.failed(error)
            raise
        self.succeeded()

    def succeeded(self) -> None:
        with self._lock:
            self._problem = None

    def failed(self, error: TransportError) -> None:
        """Keeps its text and not the error: that holds what was put."""
        if error.code in CLOSING_CODES:
            with self._lock:
                self._problem = StoreProblem(error.code, error.message)
                self._probe_at = self._clock() + PROBE_EVERY_S
