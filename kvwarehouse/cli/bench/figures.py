"""A measured figure beside its limit and its goal, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvwarehouse.cli.output import print_table

GIGABYTE = 1e9


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    """Median over the rounds."""
    unit: str
    """"GB/s", "us", ...; units last, as everywhere."""
    limit: float | None = None
    """The same on this machine without a warehouse, median over the same rounds."""
    limit_name: str = ""
    goal: str = ""
    """What the project asks of itself, in words."""
    ratio_of_rounds: float | None = None
    """Median of the rounds' ratios; steadier than the ratio of medians."""

    @property
    def ratio(self) -> float | None:
        if self.ratio_of_rounds is not None:
            return self.ratio_of_rounds
        return self.value / self.limit if self.limit else None


def print_figures(figures: Sequence[Figure], conditions: Mapping[str, object]) -> None:
    print_table("", ("", ""), list(conditions.items()))
    print_table(
        "\nmedians",
        ("measure", ">measured", ">limit", ">ratio", "limit is", "goal"),
        [
            (
                each.name,
                _shown(each.value, each.unit),
                "" if each.limit is None else _shown(each.limit, each.unit),
                "" if each.ratio is None else f"{each.ratio:.2f}",
                each.limit_name,
                each.goal,
            )
            for each in figures
        ],
    )


def _shown(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
