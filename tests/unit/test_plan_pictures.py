"""Plots and pages: well-formed, inside their frame, and true to their points."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwarehouse.report.html import page_of
from kvwarehouse.report.plot import axis_over, svg_of, tick_label
from kvwarehouse.report.report import Plot, Report, Series, TableBlock

VALUES = st.floats(0, 1e12) | st.just(float("inf"))
POINTS = st.lists(st.tuples(st.floats(0, 1e12), VALUES), max_size=8)
NASTY = "<b>\"&'</b>"


@given(POINTS, POINTS, st.booleans(), st.booleans())
def test_any_plot_is_well_formed_and_inside_its_frame(
    first: list[tuple[float, float]], second: list[tuple[float, float]], log_x: bool, log_y: bool
) -> None:
    series = [Series(NASTY, sorted(first)), Series("b", sorted(second))]
    picture = ElementTree.fromstring(svg_of(Plot(NASTY, "x & y", "<y>", series, log_x, log_y)))
    for circle in picture.iter("circle"):
        assert 69.9 <= float(circle.attrib["cx"]) <= 700.1
        assert 19.9 <= float(circle.attrib["cy"]) <= 310.1


def test_points_stand_where_their_values_are() -> None:
    picture = ElementTree.fromstring(
        svg_of(Plot("t", "x", "y", [Series("s", [(0, 0), (5, 10), (10, 5)])]))
    )
    at = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in picture.iter("circle")]
    assert at == [(70.0, 310.0), (385.0, 20.0), (700.0, 165.0)]


def test_logarithmic_axis_has_equal_steps_for_equal_ratios() -> None:
    axis = axis_over([1, 100, 10_000], 0, 100, log=True)
    assert [round(axis.place(value)) for value in (1, 10, 100, 1000, 10_000)] == [
        0,
        25,
        50,
        75,
        100,
    ]
    assert axis.ticks() == [1, 10, 100, 1000, 10_000]


def test_log_axis_over_few_powers_of_ten_has_ticks_between_them() -> None:
    assert axis_over([30, 700], 0, 100, log=True).ticks() == [50, 100, 200, 500]


@given(st.lists(st.floats(0, 1e15), min_size=1), st.booleans())
def test_ticks_are_few_and_inside_the_axis(values: list[float], log: bool) -> None:
    axis = axis_over(values, 0, 100, log=log)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 20
    assert all(-0.1 <= axis.place(tick) <= 100.1 for tick in ticks)


def test_axis_over_values_too_close_to_tell_apart_has_ticks() -> None:
    for close in (5e-324, 1e-310, 0.0):
        assert axis_over([0.0, close], 0, 100, log=False).ticks()
    assert axis_over([-1e300, -1e300 * (1 + 1e-15)], 0, 100, log=False).ticks()


@pytest.mark.parametrize(
    ("value", "label"),
    [(0, "0"), (0.05, "0.05"), (250_000, "250k"), (1.5e6, "1.5M"), (2e9, "2G"), (3e12, "3T")],
)
def test_tick_labels_are_short(value: float, label: str) -> None:
    assert tick_label(value) == label


def test_page_escapes_every_text_and_loads_nothing() -> None:
    table = TableBlock(NASTY, (NASTY, ">n"), [(NASTY, 12345)], NASTY)
    plot = Plot(NASTY, NASTY, NASTY, [Series(NASTY, [(1, 1)])])
    page = page_of(Report(NASTY, NASTY, [table, plot], {}, [NASTY]))
    assert "<b>" not in page
    assert "12,345" in page
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|link|img|iframe)\b|https?://", page)


def test_page_has_a_box_for_each_line_of_a_plot_that_hides_that_line() -> None:
    plot = Plot("t", "x", "y", [Series(name, [(1, 1)]) for name in ("a", "b", "c")])
    page = page_of(Report("t", "s", [plot], {}))
    boxes = re.findall(r'<input type="checkbox" checked class="([\w-]+)"> (\w)<', page)
    lines = re.findall(r'<g class="([\w-]+)">\s*<polyline.*?<title>(\w):', page, re.DOTALL)
    assert boxes == lines
    for name, _ in boxes:
        assert f"input.{name}:not(:checked)) g.{name} {{" in page
    alone = page_of(Report("t", "s", [Plot("t", "x", "y", [Series("a", [(1, 1)])])], {}))
    assert "checkbox" not in alone
