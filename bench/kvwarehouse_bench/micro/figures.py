"""A measured figure beside its limit and its goal, how cost grows, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvwarehouse.cli.output import print_table
from kvwarehouse_bench.micro.goals import read_goal
from kvwarehouse_bench.micro.rounds import Rounds

GIGABYTE = 1e9
MET, MISSED = "met", "missed"


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
    """What the project asks of itself, in words that goals.py reads."""
    ratio_of_rounds: float | None = None
    """Median of the rounds' ratios; steadier than the ratio of medians."""
    ratio_spread: tuple[float, float] | None = None
    """The middle half of the rounds' ratios."""

    def __post_init__(self) -> None:
        if self.goal:
            read_goal(self.goal, self.unit)

    @classmethod
    def of_speed(
        cls, name: str, moved_bytes: int, rounds: Rounds, limit_name: str, goal: str = ""
    ) -> Figure:
        """Of as many bytes moved by both sides."""
        return cls(
            name=name,
            value=moved_bytes / rounds.ours_s / GIGABYTE,
            unit="GB/s",
            limit=moved_bytes / rounds.limit_s / GIGABYTE,
            limit_name=limit_name,
            goal=goal,
            ratio_of_rounds=rounds.speed_ratio,
            ratio_spread=rounds.speed_ratio_spread,
        )

    @property
    def ratio(self) -> float | None:
        if self.ratio_of_rounds is not None:
            return self.ratio_of_rounds
        return self.value / self.limit if self.limit else None

    @property
    def verdict(self) -> str:
        """MET, MISSED, or nothing where there is no goal or nothing to judge it by."""
        if not self.goal:
            return ""
        goal = read_goal(self.goal, self.unit)
        if goal.judges == "value":
            judged: float | None = self.value
        elif goal.judges == "rounds" and self.ratio_spread is not None:
            judged = self.ratio_spread[1]
        else:
            judged = self.ratio
        if judged is None:
            return ""
        return MET if goal.holds(judged) else MISSED


@dataclass(frozen=True)
class Curve:
    """What an item costs, by how many there are."""

    plot: str
    """Curves of one plot share its axes."""
    name: str
    x_label: str
    y_label: str
    """With its unit: "ns a page"."""
    points: Sequence[tuple[float, float]]
    """Medians over the rounds, x in rising order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple((float(x), float(y)) for x, y in self.points))

    @property
    def growth(self) -> float | None:
        """What an item costs at the last point, over what it costs where it is cheapest: 1 where
        cost grows no faster than the number of items. None where it costs nothing somewhere."""
        least = min(y for _, y in self.points)
        return self.points[-1][1] / least if least > 0 else None


Measured = Sequence[Figure | Curve]


def print_figures(measured: Measured, conditions: Mapping[str, object]) -> None:
    print_table("", ("", ""), list(conditions.items()))
    figures = [each for each in measured if isinstance(each, Figure)]
    if figures:
        print_table("\nmedians", FIGURE_COLUMNS, [figure_row(each) for each in figures])
    for plot, curves in by_plot(measured).items():
        print_table(f"\n{plot}", *curve_table(curves))


FIGURE_COLUMNS = ("measure", ">measured", ">limit", ">ratio", "limit is", "goal", "verdict")


def figure_row(figure: Figure) -> tuple[str, ...]:
    return (
        figure.name,
        _shown(figure.value, figure.unit),
        "" if figure.limit is None else _shown(figure.limit, figure.unit),
        _ratio(figure),
        figure.limit_name,
        figure.goal,
        figure.verdict,
    )


def by_plot(measured: Measured) -> dict[str, list[Curve]]:
    found: dict[str, list[Curve]] = {}
    for each in measured:
        if isinstance(each, Curve):
            found.setdefault(each.plot, []).append(each)
    return found


def curve_table(curves: Sequence[Curve]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: one row for each x that any of the curves has."""
    columns = (
        f">{curves[0].x_label}",
        *(f">{curve.name}, {curve.y_label}" for curve in curves),
    )
    values = [dict(curve.points) for curve in curves]
    rows = [
        (f"{x:,.0f}", *(_number(value[x]) if x in value else "" for value in values))
        for x in sorted({x for value in values for x in value})
    ]
    return columns, rows


def _ratio(figure: Figure) -> str:
    if figure.ratio is None:
        return ""
    text = f"{figure.ratio:.2f}"
    if figure.ratio_spread is not None:
        low, high = figure.ratio_spread
        text += f" ({low:.2f} to {high:.2f})"
    return text


def _shown(value: float, unit: str) -> str:
    return f"{_number(value)} {unit}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
