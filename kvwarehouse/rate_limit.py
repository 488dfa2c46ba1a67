"""A bound on bytes a second. One owner."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """Not more than `bytes_per_s` over any longer time; None: no bound. What was not used is not
    saved up: after a pause it goes on at the same rate."""

    def __init__(
        self,
        bytes_per_s: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._next_s = clock()

    def window_bytes(self, most: int) -> int:
        """At most `most`, and at most a second's: what moves between two calls of spend is not
        slowed down."""
        return most if self._bytes_per_s is None else min(most, self._bytes_per_s)

    def spend(self, size_bytes: int) -> None:
        """Blocks until so many more bytes may have moved."""
        if self._bytes_per_s is None:
            return
        now_s = self._clock()
        self._next_s = max(self._next_s, now_s) + size_bytes / self._bytes_per_s
        self._sleep(self._next_s - now_s)
