"""Times by the million, and sums over the time of a drive, in a fixed number of counters. Not
thread-safe.

A Histogram gives percentiles within half a percent: 2,500 buckets, each 1 % wider than the one
before, hold 1 us to 18 hours; what is outside counts in the outer ones. Mean, least and most are
exact. Where a drive outgrows the spans of its Timeline each two of them become one, so a day has as
many as a minute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

_LEAST_S: Final = 1e-6
_STEP: Final = math.log(1.01)
_BUCKETS: Final = 2_500
_MOST_POINTS: Final = 40

SPANS: Final = 60


class Histogram:
    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)
        self.count = 0
        self.sum_s = 0.0
        self.least_s = math.inf
        self.most_s = 0.0

    def add(self, seconds: float) -> None:
        place = int(math.log(max(seconds, _LEAST_S) / _LEAST_S) / _STEP)
        self._counts[min(place, _BUCKETS - 1)] += 1
        self.count += 1
        self.sum_s += seconds
        self.least_s = min(self.least_s, seconds)
        self.most_s = max(self.most_s, seconds)

    @property
    def mean_s(self) -> float | None:
        return self.sum_s / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """The least value that so many percent do not exceed; None where there are none."""
        if not self.count:
            return None
        rank = max(1, math.ceil(self.count * percent / 100))
        place = int(np.searchsorted(np.cumsum(self._counts), rank))
        middle_s = _LEAST_S * math.exp((place + 0.5) * _STEP)
        return min(max(middle_s, self.least_s), self.most_s)

    def figures(self) -> dict[str, float | int | None]:
        """Seconds."""
        return {
            "count": self.count,
            "mean": self.mean_s,
            **{f"p{percent}": self.percentile(percent) for percent in (50, 90, 99)},
            "max": self.most_s if self.count else None,
        }

    def shares(self) -> Sequence[tuple[float, float]]:
        """Points (seconds, share of the values up to there) for a plot, a few."""
        if not self.count:
            return []
        percents = [100 * at / _MOST_POINTS for at in range(1, _MOST_POINTS)] + [99, 99.9]
        points = [(self.percentile(percent) or 0.0, percent / 100) for percent in sorted(percents)]
        return [*points, (self.most_s, 1.0)]


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
