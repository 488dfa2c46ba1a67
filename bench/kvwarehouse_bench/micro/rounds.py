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
        return statistics.median(self._speed_ratios())

    @property
    def speed_ratio_spread(self) -> tuple[float, float]:
        """The middle half of the rounds' ratios."""
        ratios = self._speed_ratios()
        if len(ratios) < 2:
            return ratios[0], ratios[0]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, high

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
