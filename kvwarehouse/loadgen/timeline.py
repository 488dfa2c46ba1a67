"""Sums over the time of a drive, in a fixed number of spans. Not thread-safe.

Where a drive outgrows its spans each two of them become one, so a day has as many as a minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

SPANS: Final = 60


class Timeline:
    def __init__(self, columns: int) -> None:
        self._sums = np.zeros((SPANS, columns))
        self.span_s = 1.0
        self._used = 0

    def add(self, at_s: float, *values: float) -> None:
        """`at_s` since the drive began."""
        while at_s >= SPANS * self.span_s:
            pairs = self._sums.reshape(SPANS // 2, 2, -1).sum(axis=1)
            self._sums = np.concatenate((pairs, np.zeros_like(pairs)))
            self.span_s *= 2
            self._used = (self._used + 1) // 2
        place = int(max(at_s, 0.0) / self.span_s)
        self._sums[place] += values
        self._used = max(self._used, place + 1)

    def rates(self, column: int) -> Sequence[tuple[float, float]]:
        """Points (end of the span in seconds, sum a second in it)."""
        return [
            ((place + 1) * self.span_s, float(self._sums[place, column]) / self.span_s)
            for place in range(self._used)
        ]

    def means(self, column: int, over: int) -> Sequence[tuple[float, float]]:
        """Points (end of the span in seconds, sum of one column over that of another)."""
        return [
            ((place + 1) * self.span_s, float(self._sums[place, column] / self._sums[place, over]))
            for place in range(self._used)
            if self._sums[place, over]
        ]
