"""Whether a store is worth asking: open after failures, and then one probe at a time.

Open after FAILURES failures in a row, or half of the last WINDOW calls. While it is open, a probe
is admitted FIRST_PROBE_S after it opened, and after each that fails twice as long, up to
LAST_PROBE_S; one that succeeds closes it. Thread-safe; never blocks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

FAILURES: Final = 5
WINDOW: Final = 20
FIRST_PROBE_S: Final = 1.0
LAST_PROBE_S: Final = 30.0


class Breaker:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ends: deque[bool] = deque(maxlen=WINDOW)
        self._in_a_row = 0
        self._probe_at: float | None = None  # while it is open
        self._wait_s = FIRST_PROBE_S
        self._probing = False
        self._opened = 0

    @property
    def is_open(self) -> bool:
        with self._lock:
            return self._probe_at is not None

    @property
    def times_opened(self) -> int:
        with self._lock:
            return self._opened

    def admit(self) -> bool:
        """True where a call may be made; whoever makes it says afterwards how it ended."""
        with self._lock:
            if self._probe_at is None:
                return True
            if self._probing or self._clock() < self._probe_at:
                return False
            self._probing = True
            return True

    def succeeded(self) -> None:
        """A call ended as it should, with a miss too."""
        with self._lock:
            if self._probe_at is not None:
                if not self._probing:
                    return  # begun before it opened: the probe is to say
                self._probe_at, self._wait_s, self._probing = None, FIRST_PROBE_S, False
                self._ends.clear()
            self._in_a_row = 0
            self._ends.append(True)

    def failed(self) -> None:
        with self._lock:
            if self._probe_at is not None:
                if self._probing:
                    self._wait_s = min(2 * self._wait_s, LAST_PROBE_S)
                    self._probe_at, self._probing = self._clock() + self._wait_s, False
                return
            self._in_a_row += 1
            self._ends.append(False)
            half = len(self._ends) == WINDOW and 2 * self._ends.count(False) >= WINDOW
            if self._in_a_row >= FAILURES or half:
                self._probe_at = self._clock() + self._wait_s
                self._opened += 1
                self._in_a_row = 0
