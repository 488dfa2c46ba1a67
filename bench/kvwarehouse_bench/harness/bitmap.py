"""A plot as a PNG, for places that show no SVG. Drawn with Pillow, which vLLM brings.

Stateless. The same axes and the same order of colours as the SVG has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvwarehouse.report.plot import Axis, drawable, line_colour, plot_axes, tick_label
from kvwarehouse.report.report import Plot

_WIDTH, _HEIGHT = 1440, 780
_LEFT, _RIGHT, _TOP, _BOTTOM = 130, 40, 70, 100
_LEGEND_LINE = 36
_INK, _GRID, _PAPER = "#1c1917", "#d6d3d1", "#ffffff"
_DOT = 6
_FONT_SIZE = 24


def write_png(plot: Plot, path: Path) -> None:
    from PIL import Image, ImageDraw, ImageFont

    height = _HEIGHT + _LEGEND_LINE * len(plot.series) + 20
    image = Image.new("RGB", (_WIDTH, height), _PAPER)
    draw: Any = ImageDraw.Draw(image)
    draw.font = ImageFont.load_default(_FONT_SIZE)
    x, y = plot_axes(plot, (_LEFT, _WIDTH - _RIGHT), (_HEIGHT - _BOTTOM, _TOP))
    _grid(draw, x, y)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    draw.text((middle, 16), plot.title, fill=_INK, anchor="ma")
    draw.text((middle, _HEIGHT - 44), plot.x_label, fill=_INK, anchor="ma")
    draw.text((16, _TOP - 10), plot.y_label, fill=_INK, anchor="ld")
    for at, series in enumerate(plot.series):
        colour = line_colour(at)
        _line(draw, [(x.place(px), y.place(py)) for px, py in drawable(series, x, y)], colour)
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


def _line(draw: Any, places: Sequence[tuple[float, float]], colour: str) -> None:
    draw.line(places, fill=colour, width=4)
    for px, py in places:
        draw.ellipse([(px - _DOT, py - _DOT), (px + _DOT, py + _DOT)], fill=colour)
