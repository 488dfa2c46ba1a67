"""A measured figure beside its limit and its goal, how cost grows, how they are shown, and the file
of each measure that a report is made of: measures run one at a time, and each again when it has
to be.

What the project asks of itself is in words that are shown and judged, one text for both:

    "ratio 0.75 or more"   of a figure's ratio to its limit
    "ratio 1.5 or less"
    "rounds reach ratio 0.9" of the upper end of the middle half of the rounds' ratios: for limits
                           that vary by themselves, as disks do
    "under 100 us"         of the figure itself, in its own unit

Stateless; thread-safe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvwarehouse.cli.output import print_table
from kvwarehouse.errors import UsageError
from kvwarehouse_bench.harness.alternation import Rounds

_RATIO = re.compile(r"ratio (?P<bound>\d+(?:\.\d+)?) or (?P<side>more|less)")
_ROUNDS = re.compile(r"rounds reach ratio (?P<bound>\d+(?:\.\d+)?)")
_VALUE = re.compile(r"under (?P<bound>\d[\d,]*(?:\.\d+)?) (?P<unit>\S.*)")

GIGABYTE = 1e9
MET, MISSED = "met", "missed"

FIGURE_COLUMNS = ("measure", ">measured", ">limit", ">ratio", "limit is", "goal", "verdict")


@dataclass(frozen=True)
class Goal:
    judges: Literal["value", "ratio", "rounds"]
    holds: Callable[[float], bool]


def read_goal(words: str, unit: str) -> Goal:
    """Raises ValueError on words that cannot be judged, so that no goal is shown unjudged."""
    if found := _RATIO.fullmatch(words):
        bound = float(found["bound"])
        if found["side"] == "more":
            return Goal("ratio", lambda ratio: ratio >= bound)
        return Goal("ratio", lambda ratio: ratio <= bound)
    if found := _ROUNDS.fullmatch(words):
        bound = float(found["bound"])
        return Goal("rounds", lambda ratio: ratio >= bound)
    found = _VALUE.fullmatch(words)
    if found is None or found["unit"] != unit:
        raise ValueError(
            f"the goal {words!r} of a figure in {unit!r} cannot be judged; write 'ratio N or more',"
            f" 'ratio N or less', 'rounds reach ratio N' or 'under N {unit}'"
        )
    bound = float(found["bound"].replace(",", ""))
    return Goal("value", lambda value: value < bound)


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
    """What the project asks of itself, in words that read_goal reads."""
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


_T = TypeVar("_T", Figure, Curve)


@dataclass(frozen=True)
class Result:
    measure: str
    conditions: dict[str, str]
    found: Sequence[Figure | Curve]

    def as_json(self) -> dict[str, Any]:
        figures = [each for each in self.found if isinstance(each, Figure)]
        curves = [each for each in self.found if isinstance(each, Curve)]
        return {
            "measure": self.measure,
            "conditions": self.conditions,
            "figures": [
                {**asdict(each), "ratio": each.ratio, "verdict": each.verdict} for each in figures
            ],
            "curves": [{**asdict(each), "growth": each.growth} for each in curves],
        }

    @classmethod
    def of_json(cls, made: dict[str, Any]) -> Result:
        found: list[Figure | Curve] = [
            *(_made(Figure, each) for each in made["figures"]),
            *(_made(Curve, each) for each in made["curves"]),
        ]
        return cls(made["measure"], made["conditions"], found)


def write_result(result: Result, folder: Path) -> None:
    """Replaces what the measure found before."""
    text = json.dumps(result.as_json(), indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{result.measure}.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the results folder {folder} cannot be written: {error.strerror or error}",
            code="bad_path",
        ) from error


def read_results(folder: Path, names: Sequence[str]) -> list[Result]:
    """Of those measures that were run, in the order of the names."""
    files = [folder / f"{name}.json" for name in names]
    return [_read(file) for file in files if file.exists()]


def _read(file: Path) -> Result:
    try:
        return Result.of_json(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} is no result of this version ({error}); run its measure again, or remove it",
            code="bad_result",
        ) from error


def _made(kind: type[_T], values: dict[str, Any]) -> _T:
    """What is derived stands in the file too, for its readers."""
    known = {field.name for field in fields(kind)}
    kept = {name: _tuples(value) for name, value in values.items() if name in known}
    return kind(**kept)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
