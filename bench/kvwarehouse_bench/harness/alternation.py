"""Alternating rounds, each side of a comparison in turn and which one first alternating too, and
what follows from them: medians of rounds, and how far apart rounds are. Stateless.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")

_RESAMPLES = 2000


def rotated(ways: Sequence[_T], turn: int) -> list[_T]:
    """All of them, each one first in its turn."""
    at = turn % len(ways)
    return [*ways[at:], *ways[:at]]


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


@dataclass(frozen=True)
class Rounds:
    """Seconds of each round, of both sides, in the order they ran."""

    ours: Sequence[float]
    limit: Sequence[float]

    @property
    def ours_s(self) -> float:
        return statistics.median(self.ours)

    @property
    def limit_s(self) -> float:
        return statistics.median(self.limit)

    @property
    def speed_ratio(self) -> float:
        """Our rate over the limit's, median of the rounds' ratios."""
        return statistics.median(self._speed_ratios())

    @property
    def speed_ratio_spread(self) -> tuple[float, float]:
        """The middle half of the rounds' ratios."""
        spread = middle_half(self._speed_ratios())
        return spread.low, spread.high

    def _speed_ratios(self) -> list[float]:
        return [limit / ours for ours, limit in zip(self.ours, self.limit, strict=True)]


def joined(parts: Sequence[Rounds]) -> Rounds:
    """Of parts that ran one after the other."""
    return Rounds(
        [seconds for part in parts for seconds in part.ours],
        [seconds for part in parts for seconds in part.limit],
    )


def alternate(
    rounds: int,
    ours: Callable[[], float],
    limit: Callable[[], float],
) -> Rounds:
    """Both in turns, as `in_turns` runs them."""
    mine, theirs = in_turns(rounds, [ours, limit])
    return Rounds(mine, theirs)


def in_turns(rounds: int, sides: Sequence[Callable[[], float]]) -> list[list[float]]:
    """Each side runs once to warm up, then `rounds` times, another one first each time. Each
    returns the seconds of its measured part, so that what it prepares does not count. Returned:
    the seconds of each side's rounds."""
    for run in sides:
        run()
    taken: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds):
        for at in range(len(sides)):
            side = (turn + at) % len(sides)
            taken[side].append(sides[side]())
    return taken


def p50(call: Callable[[], object], calls: int) -> float:
    """Seconds of the median call."""
    return statistics.median(timed(call) for _ in range(calls))


def timed(call: Callable[[], object], times: int = 1) -> float:
    """Seconds of one call, on average over `times`."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
