"""What became of LMCache's tasks, until it asks; each is told once.

Thread-safe; nothing blocks.
"""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

_T = TypeVar("_T")

# LMCache never asks for the tasks of requests that it gave up; the oldest of so many go.
_MOST = 4096


class Notifier(Protocol):
    """LMCache's EventNotifier."""

    def fileno(self) -> int: ...
    def notify(self) -> None: ...
    def close(self) -> None: ...


class TaskResults(Generic[_T]):
    """notifier: signalled after each task; this owns it."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._lock = threading.Lock()
        self._done: dict[int, _T] = {}
        self._closed = False

    def fileno(self) -> int:
        return self._notifier.fileno()

    def put(self, task: int, result: _T) -> None:
        with self._lock:
            if self._closed:
                return
            self._done[task] = result
            if len(self._done) > _MOST:
                del self._done[next(iter(self._done))]
            self._notifier.notify()

    def take(self, task: int) -> _T | None:
        with self._lock:
            return self._done.pop(task, None)

    def take_all(self) -> dict[int, _T]:
        with self._lock:
            taken, self._done = self._done, {}
            return taken

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._notifier.close()
