"""One axis of a plot: where a value lies on it, and where its ticks are. Stateless; thread-safe."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """From `low` to `high` over `begin` to `end` of the picture. A logarithmic axis takes only
    positive values."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        low, high, at = (self._scaled(each) for each in (self.low, self.high, value))
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value


def axis_over(values: Iterable[float], begin: float, end: float, *, log: bool) -> Axis:
    """Wide enough for all values, never empty; a linear one starts at 0 where all are positive."""
    kept = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(kept), max(kept)) if kept else (1.0, 10.0)
    if not log and low > 0:
        low = 0.0
    if log and high <= low:
        high = low * 10
    # Values so close that no step between them can be told apart are one value.
    if not log and high - low <= max(1e-290, 1e-12 * abs(high)):
        high = low + max(1.0, abs(low))
    return Axis(low, high, begin, end, log)


def tick_label(value: float) -> str:
    """Short: 250000 is "250k", 0.05 is "0.05"."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [at * step for at in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 8)
    # Over few powers of ten there is room for what lies between them.
    between = (1, 2, 5) if last - first <= 3 else (1,)
    found = [step * 10.0**power for power in range(first, last + 1, every) for step in between]
    inside = [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    return inside or [low, high]
