"""Threads with a bounded queue, so that LMCache's two controller threads never wait.

Thread-safe. Only `close` blocks.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

# A thread with nothing to do looks around so often.
_IDLE_S = 1.0


class Workers:
    """name: of the threads. most: calls that wait. idle: called now and then by each thread."""

    def __init__(
        self, name: str, threads: int, most: int, idle: Callable[[], object] = lambda: None
    ) -> None:
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue(most)
        self._idle = idle
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvw-lmcache-{name}", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def submit(self, call: Callable[[], None]) -> bool:
        """Never blocks. False where the queue is full or closed: the call will not be made."""
        if self._closed.is_set():
            return False
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Calls that wait are not made any more; False where one that runs outlasts the time."""
        self._closed.set()
        for _ in self._threads:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(lambda: None)  # wakes those that wait for a call
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                call: Callable[[], object] = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                call = self._idle
            try:
                call()
            except Exception:  # noqa: BLE001 - a thread's edge: the next call may succeed
                _log.exception("kvwarehouse: a call of LMCache's failed")
