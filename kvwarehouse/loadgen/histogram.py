"""Times by the million in a fixed number of counters: percentiles within half a percent.

Not thread-safe. 2,500 buckets, each 1 % wider than the one before, hold 1 us to 18 hours; what is
outside counts in the outer ones. Mean, least and most are exact.
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
