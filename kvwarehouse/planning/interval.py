"""A quantity that is not known exactly: a value and the range it lies in.

Immutable; thread-safe. Invariant: low <= value <= high. Arithmetic is that of intervals: the range
of a result holds every result that the ranges of its parts allow, and is therefore never too
narrow. A quantity that stands twice in a formula widens it: write x/(x+y) as 1/(1+y/x).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Quantity:
    """All three in one unit, which is the user's affair."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        # Arithmetic rounds: equal ends may come out in the wrong order by the last digit.
        slack = 1e-9 * max(abs(self.low), abs(self.high), 1e-30)
        assert self.low <= self.value + slack, self
        assert self.value <= self.high + slack, self

    def __add__(self, other: Quantity | float) -> Quantity:
        b = quantity(other)
        return Quantity(self.value + b.value, self.low + b.low, self.high + b.high)

    def __sub__(self, other: Quantity | float) -> Quantity:
        b = quantity(other)
        return Quantity(self.value - b.value, self.low - b.high, self.high - b.low)

    def __mul__(self, other: Quantity | float) -> Quantity:
        """Of two that are not negative."""
        b = quantity(other)
        return Quantity(self.value * b.value, self.low * b.low, self.high * b.high)

    def __truediv__(self, other: Quantity | float) -> Quantity:
        """By one that is positive throughout, of one that is not negative."""
        b = quantity(other)
        return Quantity(self.value / b.value, self.low / b.high, self.high / b.low)

    def at_least(self, least: float) -> Quantity:
        return self.rising(lambda each: max(least, each))

    def rising(self, function: Callable[[float], float]) -> Quantity:
        """Of a function that never falls."""
        return Quantity(function(self.value), function(self.low), function(self.high))


def quantity(value: Quantity | float) -> Quantity:
    return value if isinstance(value, Quantity) else Quantity(value, value, value)


def within(value: float, part_below: float, part_above: float) -> Quantity:
    """`within(10, 0.2, 0.5)` is 10, from 8 to 15."""
    return Quantity(value, value * (1 - part_below), value * (1 + part_above))


@dataclass(frozen=True)
class Estimate:
    """A quantity with its name, its unit and what was assumed to get it."""

    name: str
    amount: Quantity
    unit: str
    assumption: str

    def figures(self) -> dict[str, Any]:
        return {
            "value": self.amount.value,
            "low": self.amount.low,
            "high": self.amount.high,
            "unit": self.unit,
            "assumption": self.assumption,
        }
