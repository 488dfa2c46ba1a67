"""Random numbers that are the same for the same seed, on every machine and in every version.

Only `random.Random.random` is used, whose sequence Python promises to keep; what numpy draws may
change between its versions. Not thread-safe: a workload has its own.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

_NORMAL: Final = NormalDist()
_LEAST: Final = 2.0**-54


class Draws:
    def __init__(self, seed: int, name: str) -> None:
        """Streams of one seed and different names have nothing to do with each other."""
        self._next = random.Random(f"{seed}:{name}").random

    def part(self) -> float:
        """Uniform, 0 up to 1."""
        return self._next()

    def chance(self, probability: float) -> bool:
        return self._next() < probability

    def below(self, count: int) -> int:
        return int(self._next() * count)

    def wait(self, mean: float) -> float:
        """Exponential: the time to the next of events that know nothing of each other."""
        return -mean * math.log(1.0 - self._next())

    def normal(self) -> float:
        """Of mean 0 and deviation 1."""
        return _NORMAL.inv_cdf(self._next() or _LEAST)

    def times(self, go_on: float, most: int) -> int:
        """1, and one more with probability `go_on` each time, at most `most`."""
        count = 1
        while count < most and self._next() < go_on:
            count += 1
        return count

    def shuffled(self, count: int) -> list[int]:
        """0 to count - 1 in any order."""
        order = list(range(count))
        for at in range(count - 1, 0, -1):
            other = self.below(at + 1)
            order[at], order[other] = order[other], order[at]
        return order


class Popularity:
    """Ranks 0 to count - 1, of which rank r is drawn with a weight of 1 / (r + 1)^skew (Zipf)."""

    def __init__(self, count: int, skew: float) -> None:
        total, self._sums = 0.0, []
        for rank in range(count):
            total += (rank + 1) ** -skew
            self._sums.append(total)

    def draw(self, draws: Draws) -> int:
        return min(bisect_right(self._sums, draws.part() * self._sums[-1]), len(self._sums) - 1)


class QuantileCurve:
    """A positive quantity by its published quantiles: ln(value) is linear in the normal score
    between them, and goes on so beyond the outer two. Two quantiles make it lognormal."""

    def __init__(
        self, points: Sequence[tuple[float, float]], *, least: float = 0.0, most: float = math.inf
    ) -> None:
        """`points`: (probability, value), both rising, two at least."""
        self._scores = [_NORMAL.inv_cdf(probability) for probability, _ in points]
        self._logs = [math.log(value) for _, value in points]
        self._least, self._most = least, most

    def at(self, score: float) -> float:
        """The value at a normal score."""
        scores, logs = self._scores, self._logs
        place = 0
        while place < len(scores) - 2 and score > scores[place + 1]:
            place += 1
        slope = (logs[place + 1] - logs[place]) / (scores[place + 1] - scores[place])
        value = math.exp(logs[place] + slope * (score - scores[place]))
        return min(max(value, self._least), self._most)

    def draw(self, draws: Draws) -> float:
        return self.at(draws.normal())
