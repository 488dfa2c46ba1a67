"""Medians of rounds, and how far apart rounds are. Stateless."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_RESAMPLES = 2000


@dataclass(frozen=True)
class Spread:
    """low and high: of the middle half of the rounds, or of a 95 % interval; see who made it."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def middle_half(values: Sequence[float]) -> Spread:
    """The median and the quartiles; of a single round itself."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Of rounds that ran side by side: the middle half of their ratios."""
    return middle_half([a / b for a, b in zip(over, under, strict=True)])


def interval(
    values: Sequence[float],
    of: Callable[[Sequence[float]], float] = statistics.median,
    seed: int = 0,
) -> Spread:
    """`of` all values, with a 95 % interval by bootstrap (Efron 1979, percentile method)."""
    numbers = random.Random(seed)
    found = sorted(of(numbers.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return Spread(of(values), found[_RESAMPLES // 40], found[-_RESAMPLES // 40])


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation between the values beside it."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
