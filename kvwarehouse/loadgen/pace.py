"""When the next request goes out, and which: by the trace's clock, or as soon as one is done.

Thread-safe: workers take requests one after the other. Bounds: the requests, the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvwarehouse.workloads.call import Call


@dataclass(frozen=True)
class Bounds:
    """`speed` None: closed loop, a request as soon as a worker is free. Else open: the trace's
    times divided by it, whether the engine keeps up or not. At most `workers` are under way."""

    workers: int
    speed: float | None
    requests: int | None
    duration_s: float | None
    deadline_s: float


class Pace:
    def __init__(
        self, requests: Iterator[Call], bounds: Bounds, clock: Callable[[], float]
    ) -> None:
        self._requests = requests
        self._bounds = bounds
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._first_s: float | None = None
        self._taken = 0
        self.begin_s = clock()

    def take(self) -> tuple[Call, float | None] | None:
        """The next request, after waiting for its time, and how late it is then (None in a closed
        loop); None when there are no more."""
        with self._lock:
            request = self._next()
        if request is None:
            return None
        if self._bounds.speed is None:
            return (request, None) if self._in_time(self._clock()) else None
        due_s = self.begin_s + (request.time_s - (self._first_s or 0.0)) / self._bounds.speed
        if not self._in_time(due_s) or not self._in_time(self._clock()):
            return None
        if self._stopped.wait(max(0.0, due_s - self._clock())):
            return None
        return request, max(0.0, self._clock() - due_s)

    def stop(self) -> None:
        """No request goes out from now on."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def _next(self) -> Call | None:
        if self._stopped.is_set() or self._taken == self._bounds.requests:
            return None
        request = next(self._requests, None)
        if request is not None:
            self._taken += 1
            if self._first_s is None:
                self._first_s = request.time_s
        return request

    def _in_time(self, at_s: float) -> bool:
        duration_s = self._bounds.duration_s
        return duration_s is None or at_s < self.begin_s + duration_s
