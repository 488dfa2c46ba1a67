"""Objects that gets of this host found damaged, until it has put them anew. Their next put may
neither copy what is there nor leave it be.

Other hosts may find the same, and each heals what it found. Bounded: the oldest go first, and are
found again. Thread-safe; never blocks.
"""

from __future__ import annotations

import threading
from typing import Final

KEPT_MAX: Final = 4096


class DamagedObjects:
    """By their last page's key, and the epoch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[bytes, int], None] = {}  # the latest last

    def add(self, key: bytes, epoch: int) -> None:
        with self._lock:
            self._found.pop((key, epoch), None)
            self._found[key, epoch] = None
            if len(self._found) > KEPT_MAX:
                del self._found[next(iter(self._found))]

    def has(self, key: bytes, epoch: int) -> bool:
        with self._lock:
            return (key, epoch) in self._found

    def healed(self, key: bytes, epoch: int) -> None:
        with self._lock:
            self._found.pop((key, epoch), None)
