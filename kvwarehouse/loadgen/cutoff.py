"""Ends connections at their deadlines, whatever the other side does: a stream that drips a byte now
and then outlives every timeout of a single read.

Thread-safe; one thread of its own, which ends with close().
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Line:
    """A connection under way. `cut` says why it was ended: "", "deadline" or "interrupted"."""

    def __init__(self, connection: socket.socket, end_s: float) -> None:
        self.connection = connection
        self.end_s = end_s
        self.cut = ""


class Cutoff:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._lines: set[Line] = set()
        self._over = False
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="kvw-cutoff", daemon=True)
        self._thread.start()

    @contextmanager
    def line(self, connection: socket.socket, end_s: float) -> Iterator[Line]:
        """Within it the connection is ended at `end_s` of the clock, or by hang_up()."""
        line = Line(connection, end_s)
        with self._changed:
            self._lines.add(line)
            if self._over:
                self._end(line, "interrupted")
            self._changed.notify()
        try:
            yield line
        finally:
            with self._changed:
                self._lines.discard(line)

    def hang_up(self) -> None:
        """Ends all connections, and those that are still to come."""
        with self._changed:
            self._over = True
            for line in self._lines:
                self._end(line, "interrupted")

    @property
    def over(self) -> bool:
        return self._over

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                now_s = self._clock()
                for line in self._lines:
                    if line.end_s <= now_s:
                        self._end(line, "deadline")
                waiting = [line.end_s for line in self._lines if not line.cut]
                self._changed.wait(max(0.001, min(waiting) - now_s) if waiting else None)

    @staticmethod
    def _end(line: Line, why: str) -> None:
        """With the lock held, so that the connection is not closed, and its number not another's,
        meanwhile."""
        if line.cut:
            return
        line.cut = why
        # Of the plain socket, also beneath TLS, whose own shutdown is not for other threads. An
        # error: the other side has ended it already.
        with suppress(OSError):
            socket.socket.shutdown(line.connection, socket.SHUT_RDWR)
