"""Calls to a disk that may hang: each is waited for so long at most."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

ANSWER_S: Final = 30.0
"""As --nvme-answer-s by default."""


class LateDiskError(OSError):
    """The disk has not answered in its time. What was asked of it may happen yet."""


class DiskCalls:
    """Of one disk. Thread-safe. Nothing ends a call that a disk keeps: it goes on in its thread.
    Until it has ended no other begins, which would wait behind it, and what it returns is
    dropped."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._late: list[threading.Thread] = []

    def wait_for(self, call: Callable[[], _T]) -> _T:
        """What `call` returns or raises. Blocks for `answer_s` at most, and not at all while an
        earlier call is late: then raises LateDiskError."""
        with self._lock:
            self._late = [thread for thread in self._late if thread.is_alive()]
            if self._late:
                raise self._error()
        answer: Future[_T] = Future()
        thread = threading.Thread(target=_run, args=(call, answer), name="disk", daemon=True)
        thread.start()
        if not wait([answer], self._answer_s).done:
            with self._lock:
                self._late.append(thread)
            raise self._error()
        return answer.result()

    def _error(self) -> LateDiskError:
        text = f"the disk has not answered within {self._answer_s:g} s"
        return LateDiskError(errno.ETIMEDOUT, text)


def _run(call: Callable[[], Any], answer: Future[Any]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where it was asked for
        answer.set_exception(error)
