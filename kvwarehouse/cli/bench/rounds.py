"""Alternating rounds: each side of a comparison in turn, which one first alternating too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
        return statistics.median(
            limit / ours for ours, limit in zip(self.ours, self.limit, strict=True)
        )


def alternate(
    rounds: int,
    ours: Callable[[], float],
    limit: Callable[[], float],
) -> Rounds:
    """`ours` and `limit` each run once to warm up, then `rounds` times. Each returns the seconds of
    its measured part, so that what it prepares does not count."""
    ours()
    limit()
    mine: list[float] = []
    theirs: list[float] = []
    for turn in range(rounds):
        sides = [(ours, mine), (limit, theirs)]
        for run, taken in sides if turn % 2 == 0 else reversed(sides):
            taken.append(run())
    return Rounds(mine, theirs)


def timed(call: Callable[[], object], times: int = 1) -> float:
    """Seconds of one call, on average over `times`."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
