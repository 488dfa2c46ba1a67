"""A plot as a PNG, for places that show no SVG. Drawn with Pillow, which vLLM brings.

Stateless. The same axes and the same order of colours as the SVG has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvwarehouse.report.plot import Axis, axis_over, tick_label
from kvwarehouse.report.report import Plot, Series

_WIDTH, _HEIGHT = 1440, 780
_LEFT, _RIGHT, _TOP, _BOTTOM = 130, 40, 70, 100
_LEGEND_LINE = 36
_INK, _GRID, _PAPER = "#1c1917", "#d6d3d1", "#ffffff"
_COLOURS = (
    *("#0b66c3", "#c2410c", "#15803d", "#7c3aed"),
    *("#be185d", "#57534e", "#a16207", "#0e7490"),
    *("#65a30d", "#f472b6"),
)
_DOT = 6
_FONT_SIZE = 24


def write_png(plot: Plot, path: Path) -> None:
    from PIL import Image, ImageDraw, ImageFont

    height = _HEIGHT + _LEGEND_LINE * len(plot.series) + 20
    image = Image.new("RGB", (_WIDTH, height), _PAPER)
    draw: Any = ImageDraw.Draw(image)
    draw.font = ImageFont.load_default(_FONT_SIZE)
    points = [point for series in plot.series for point in series.points]
    x = axis_over((p[0] for p in points), _LEFT, _WIDTH - _RIGHT, log=plot.log_x)
    y = axis_over((p[1] for p in points), _HEIGHT - _BOTTOM, _TOP, log=plot.log_y)
    _grid(draw, x, y)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    draw.text((middle, 16), plot.title, fill=_INK, anchor="ma")
    draw.text((middle, _HEIGHT - 44), plot.x_label, fill=_INK, anchor="ma")
    draw.text((16, _TOP - 10), plot.y_label, fill=_INK, anchor="ld")
    for at, series in enumerate(plot.series):
        colour = _COLOURS[at % len(_COLOURS)]
        _line(draw, _places(series, x, y), colour)
        top = _HEIGHT + _LEGEND_LINE * at
        draw.line([(_LEFT, top + 14), (_LEFT + 60, top + 14)], fill=colour, width=4)
        draw.text((_LEFT + 76, top + 14), series.name, fill=_INK, anchor="lm")
    image.save(path)


def _grid(draw: Any, x: Axis, y: Axis) -> None:
    bottom = _HEIGHT - _BOTTOM
    for tick in x.ticks():
        draw.line([(x.place(tick), _TOP), (x.place(tick), bottom)], fill=_GRID, width=2)
        draw.text((x.place(tick), bottom + 10), tick_label(tick), fill=_INK, anchor="ma")
    for tick in y.ticks():
        draw.line([(_LEFT, y.place(tick)), (_WIDTH - _RIGHT, y.place(tick))], fill=_GRID, width=2)
        draw.text((_LEFT - 12, y.place(tick)), tick_label(tick), fill=_INK, anchor="rm")


def _places(series: Series, x: Axis, y: Axis) -> list[tuple[float, float]]:
    return [
        (x.place(px), y.place(py))
        for px, py in series.points
        if math.isfinite(py) and (px > 0 or not x.log) and (py > 0 or not y.log)
    ]


def _line(draw: Any, places: Sequence[tuple[float, float]], colour: str) -> None:
    draw.line(places, fill=colour, width=4)
    for px, py in places:
        draw.ellipse([(px - _DOT, py - _DOT), (px + _DOT, py + _DOT)], fill=colour)
