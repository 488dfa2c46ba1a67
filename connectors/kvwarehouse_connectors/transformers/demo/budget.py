"""The demo's time: what still fits into it, and when a row is given up. Not thread-safe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

PLAN_S = 150.0
"""A row is begun when it is expected to end by then, counted from the command's start."""
LIMIT_S = 165.0
"""A row that turns out slower is given up then, so that the whole stays under three minutes."""


class OutOfTimeError(Exception):
    """The row that is being measured will not be finished."""


class Budget:
    """started: the clock's reading when the command began, before anything was imported.
    unlimited: the user chose the length, and waits for it."""

    def __init__(
        self,
        started: float,
        *,
        unlimited: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._started = started
        self._clock = clock
        self._plan_s = math.inf if unlimited else PLAN_S
        self._limit_s = math.inf if unlimited else LIMIT_S

    @property
    def spent_s(self) -> float:
        return self._clock() - self._started

    def fits(self, more_s: float) -> bool:
        """True where work of more_s is expected to end in time."""
        return self.spent_s + more_s <= self._plan_s

    def check(self) -> None:
        """Raises OutOfTimeError where the time is up."""
        if self.spent_s > self._limit_s:
            raise OutOfTimeError
