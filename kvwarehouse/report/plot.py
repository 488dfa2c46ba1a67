"""A plot: where its values and ticks lie, and the whole of it as SVG text that stands inside a
page, with no script, no style sheet and no font of its own.

Stateless; thread-safe. Colours tell lines apart together with dashes, for readers who see no
colours; each line is named beside its last point and in the legend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from kvwarehouse.report.report import Plot, Series

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 20, 50
_LEGEND_LINE = 18
_COLOURS = (
    *("#0b66c3", "#c2410c", "#15803d", "#7c3aed"),
    *("#be185d", "#57534e", "#a16207", "#0e7490"),
    *("#65a30d", "#f472b6"),
)
_DASHES = ("", "7 4", "2 4", "10 4 2 4", "4 2", "1 2")


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


def plot_axes(
    plot: Plot, horizontal: tuple[float, float], vertical: tuple[float, float]
) -> tuple[Axis, Axis]:
    """Over all points of the plot; `vertical` begins at the bottom."""
    points = [point for series in plot.series for point in series.points]
    x = axis_over((p[0] for p in points), *horizontal, log=plot.log_x)
    return x, axis_over((p[1] for p in points), *vertical, log=plot.log_y)


def drawable(series: Series, x: Axis, y: Axis) -> list[tuple[float, float]]:
    """The points that have a place: finite, and positive where the axis is logarithmic."""
    return [
        (px, py)
        for px, py in series.points
        if math.isfinite(py) and (px > 0 or not x.log) and (py > 0 or not y.log)
    ]


def line_colour(at: int) -> str:
    """Of the plot's line with this number, wherever it is drawn."""
    return _COLOURS[at % len(_COLOURS)]


def svg_of(plot: Plot) -> str:
    """One <svg> element."""
    legend_height = _LEGEND_LINE * len(plot.series) + 8
    x, y = plot_axes(plot, (_LEFT, _WIDTH - _RIGHT), (_HEIGHT - _BOTTOM, _TOP))
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + legend_height}" role="img"'
        f' aria-label="{escape(plot.title, quote=True)}" font-size="12" fill="currentColor">',
        *_grid(x, y),
        *_labels(plot),
    ]
    for at, series in enumerate(plot.series):
        # One group a line: a page that offers to hide lines names it.
        parts += [f'<g class="{line_class(at)}">', *_line(series, x, y, at), *_legend(series, at)]
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def line_class(at: int) -> str:
    """Of the plot's line with this number, in its <svg>."""
    return f"line-{at}"


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    bottom, top = _HEIGHT - _BOTTOM, _TOP
    for tick in x.ticks():
        at = f"{x.place(tick):.1f}"
        parts.append(
            f'<line x1="{at}" y1="{top}" x2="{at}" y2="{bottom}" stroke="#8886"/>'
            f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{tick_label(tick)}</text>'
        )
    for tick in y.ticks():
        at = f"{y.place(tick):.1f}"
        parts.append(
            f'<line x1="{_LEFT}" y1="{at}" x2="{_WIDTH - _RIGHT}" y2="{at}" stroke="#8886"/>'
            f'<text x="{_LEFT - 6}" y="{at}" dy="4" text-anchor="end">{tick_label(tick)}</text>'
        )
    return parts


def _labels(plot: Plot) -> list[str]:
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    height = (_TOP + _HEIGHT - _BOTTOM) / 2
    return [
        f'<text x="{middle}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(plot.x_label)}</text>',
        f'<text transform="translate(14 {height}) rotate(-90)" text-anchor="middle">'
        f"{escape(plot.y_label)}</text>",
    ]


def _line(series: Series, x: Axis, y: Axis, at: int) -> list[str]:
    shown = drawable(series, x, y)
    path = " ".join(f"{x.place(px):.1f},{y.place(py):.1f}" for px, py in shown)
    colour = line_colour(at)
    parts = [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"'
        f' stroke-dasharray="{_DASHES[at % len(_DASHES)]}"/>'
    ]
    for px, py in shown:
        # The stroke is not seen but pointed at: a title comes up near its point already.
        parts.append(
            f'<circle cx="{x.place(px):.1f}" cy="{y.place(py):.1f}" r="3" fill="{colour}"'
            ' stroke="#0000" stroke-width="14">'
            f"<title>{escape(series.name)}: {px:,.6g}, {py:,.6g}</title></circle>"
        )
    return parts


def _legend(series: Series, at: int) -> list[str]:
    height = _HEIGHT + _LEGEND_LINE * at + 8
    colour = line_colour(at)
    return [
        f'<line x1="{_LEFT}" y1="{height}" x2="{_LEFT + 30}" y2="{height}" stroke="{colour}"'
        f' stroke-width="2" stroke-dasharray="{_DASHES[at % len(_DASHES)]}"/>'
        f'<text x="{_LEFT + 38}" y="{height}" dy="4">{escape(series.name)}</text>'
    ]
