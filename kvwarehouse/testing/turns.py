"""Tests that run beside each other in several processes, and those that must run alone.

    with turns.shared(): ...      # beside all others that share
    with turns.alone(): ...       # beside nobody

Who wants to be alone keeps those out who come after, so that it waits for what runs and no longer.
A process that ends in any way gives its turn back. Safe between threads and processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """folder: the same for all who take part; it must exist."""

    def __init__(self, folder: Path) -> None:
        self._door, self._room = folder / "door", folder / "room"

    def shared(self) -> contextlib.AbstractContextManager[None]:
        return self._enter(fcntl.LOCK_SH)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return self._enter(fcntl.LOCK_EX)

    @contextlib.contextmanager
    def _enter(self, how: int) -> Iterator[None]:
        # The door is held by one at a time, and by whoever waits for the room to be empty.
        with _locked(self._door, fcntl.LOCK_EX):
            room = _open(self._room)
            try:
                fcntl.flock(room, how)
            except BaseException:
                os.close(room)
                raise
        try:
            yield
        finally:
            os.close(room)


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    # Programs that a test starts must not hold its turn.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
