"""The benchmark's arithmetic: what is compared with what, in which order, and how it is judged."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from kvwarehouse.errors import UsageError
from kvwarehouse_bench.harness.alternation import Rounds, alternate, in_turns
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.micro import MEASURES, by_page
from kvwarehouse_bench.micro.figures import (
    MET,
    MISSED,
    Curve,
    Figure,
    Result,
    print_figures,
    read_results,
    write_result,
)
from kvwarehouse_bench.micro.options import Options, Sizes
from kvwarehouse_bench.micro.process import core_s
from kvwarehouse_bench.micro.report import (
    BEGIN,
    END,
    bench_report,
    goals_table,
    picture_name,
    plot_of,
    plots,
    with_results,
)

_PR_SET_NAME = 15  # linux/prctl.h
_MOST_S = 60.0


def test_rounds_alternate_which_side_goes_first_after_one_to_warm_up() -> None:
    order: list[str] = []
    seconds = count(1)

    def side(name: str) -> float:
        order.append(name)
        return float(next(seconds))

    rounds = alternate(2, lambda: side("ours"), lambda: side("limit"))
    assert order == ["ours", "limit", "ours", "limit", "limit", "ours"]
    assert (rounds.ours, rounds.limit) == ([3, 6], [4, 5])


def test_sides_in_turns_keep_their_own_rounds_whoever_goes_first() -> None:
    order: list[int] = []

    def side(number: int) -> float:
        order.append(number)
        return float(number)

    taken = in_turns(3, [lambda number=number: side(number) for number in range(3)])  # type: ignore[misc]
    assert order[3:] == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert taken == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]


def test_speed_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    assert Rounds([2, 4, 100], [1, 3, 100]).speed_ratio == 0.75
    assert Rounds([2, 4, 100], [1, 3, 100]).ours_s == 4
    assert Rounds([2, 4, 100], [1, 3, 100]).speed_ratio_spread == (0.625, 0.875)


def test_figure_without_a_limit_has_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    bare, compared = Figure("a", 5, "us"), Figure("b", 5, "us", limit=10)
    assert (bare.ratio, compared.ratio) == (None, 0.5)
    print_figures([bare, compared], {"machine": "m"})
    assert "0.50" in capsys.readouterr().out


def _spread(low: float, median: float, high: float) -> Figure:
    return Figure(
        "a",
        8,
        "GB/s",
        limit=10,
        goal="rounds reach ratio 0.75",
        ratio_of_rounds=median,
        ratio_spread=(low, high),
    )


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure("a", 8, "GB/s", limit=10, goal="ratio 0.75 or more"), MET),
        (Figure("a", 7, "GB/s", limit=10, goal="ratio 0.75 or more"), MISSED),
        (Figure("a", 8, "GB/s", limit=10, goal="ratio 0.75 or more", ratio_of_rounds=0.7), MISSED),
        (Figure("a", 2, "s", limit=10, goal="ratio 0.15 or less"), MISSED),
        (Figure("a", 1, "s", limit=10, goal="ratio 0.15 or less"), MET),
        (Figure("a", 8, "GB/s", limit=10, goal="rounds reach ratio 0.75"), MET),
        (_spread(0.6, 0.7, 0.76), MET),
        (_spread(0.6, 0.7, 0.74), MISSED),
        (Figure("a", 999.9, "us", goal="under 1,000 us"), MET),
        (Figure("a", 1000, "us", goal="under 1,000 us"), MISSED),
        (Figure("a", 0.5, "% of a core", goal="under 0.5 % of a core"), MISSED),
        (Figure("a", 8, "GB/s", goal="ratio 0.75 or more"), ""),
        (Figure("a", 8, "GB/s"), ""),
    ],
)
def test_goal_is_judged_by_its_own_words(figure: Figure, verdict: str) -> None:
    assert figure.verdict == verdict


@pytest.mark.parametrize("words", ["fast", "under 1 s", "0.75 or more", "ratio 0.75"])
def test_goal_that_cannot_be_judged_is_refused_with_its_words(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Figure("a", 5, "us", goal=words)


def test_growth_is_the_last_point_over_the_cheapest() -> None:
    def growth(*costs: float) -> float:
        return Curve("p", "n", "x", "us", list(enumerate(costs, 1))).growth

    assert growth(8, 4, 2) == 1  # linear, with a fixed part
    assert growth(8, 2, 6) == 3  # more for each when there are more


def test_daemon_of_a_bench_has_room_for_what_is_moved() -> None:
    options = Options(rounds=9, page_bytes=2 << 20, pages=128, nvme_dir=None)
    assert options.dram_bytes > 2 * options.moved_bytes
    assert options.nvme_bytes > 2 * options.moved_bytes
    assert options.pages_of(8 << 20) == 32


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_has_its_module(name: str) -> None:
    pytest.importorskip("kvwarehouse.core._native", reason="the core is not built")
    module = __import__(f"kvwarehouse_bench.micro.{name}", fromlist=["measure"])
    assert callable(module.measure)


# --- reports


def result(measure: str = "load") -> Result:
    return Result(
        measure,
        {"machine": "m", "rounds": "9", "load before": "0.10 0 0", "load after": "0.2 0 0"},
        [
            Figure("good", 8, "GB/s", 10, "copy", "ratio 0.75 or more", 0.8, (0.7, 0.9)),
            Figure("bad|", 5, "GB/s", 10, "copy", "ratio 0.75 or more"),
            Figure("plain", 5, "GB/s"),
            Curve("cost by pages", "lookup", "pages", "ns a page", ((1, 10.0), (100, 4.0))),
            Curve("cost by pages", "hashing", "pages", "ns a page", ((1, 5.0), (100, 2.0))),
        ],
    )


def test_result_is_read_as_it_was_written_and_in_the_order_asked(tmp_path: Path) -> None:
    for name in ("load", "store"):
        write_result(result(name), tmp_path / "new")
    assert read_results(tmp_path / "new", ["store", "none", "load"]) == [
        result("store"),
        result("load"),
    ]


def test_result_that_is_none_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text('{"measure": "load"}')
    with pytest.raises(UsageError, match=r"load\.json"):
        read_results(tmp_path, ["load"])


def test_report_lists_missed_goals_as_it_lists_met_ones() -> None:
    report = bench_report([result()])
    assert report.summary == "1 of 2 goals met, 1 missed."
    assert [row[-1] for row in goals_table([result()]).rows] == [MET, MISSED]
    [plot] = plots([result()])
    assert [series.name for series in plot.series] == ["lookup", "hashing"]


def test_plot_is_logarithmic_only_over_values_far_apart() -> None:
    def log_y(*values: float) -> bool:
        return plot_of([Curve("p", "n", "x", "us", list(enumerate(values, 1)))]).log_y

    assert log_y(1, 20)
    assert not log_y(1, 19)
    assert not log_y(0, 19)


def test_document_has_tables_and_pictures_between_its_marks_and_nothing_else_changes() -> None:
    before, after = "# Title\n\nwords\n\n", "\nmore words\n"
    written = with_results(before + BEGIN + "old\n" + END + after, [result()], "images")
    assert written.startswith(before + BEGIN)
    assert written.endswith(END + after)
    assert "old" not in written
    assert "machine: m." in written
    assert "load before it: load 9 at 0.10." in written
    assert "| good | 8 GB/s | 10 GB/s | 0.80 (0.70 to 0.90) |" in written
    assert "| **missed** |" in written
    assert r"| bad\| |" in written
    assert "| 100 | 4 | 2 |" in written
    [plot] = plots([result()])
    assert f"](images/{picture_name(plot)})" in written
    assert with_results(written, [result()], "images") == written


def test_document_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="warehouse alone"):
        with_results("# Title\n", [result()], "images")


def test_nvme_is_measured_with_pages_of_several_sizes_unless_one_is_named() -> None:
    options = Options(rounds=9, page_bytes=2 << 20, pages=128, nvme_dir="/nvme")
    each = list(by_page("nvme", options))
    assert [(one.page_bytes, one.pages) for one in each] == [
        (256 << 10, 1024),
        (1 << 20, 256),
        (2 << 20, 128),
        (8 << 20, 32),
    ]
    named = Options(9, 2 << 20, 128, "/nvme", sizes=Sizes(page_bytes=(2 << 20,)))
    assert list(by_page("nvme", named)) == [named]
    assert list(by_page("load", options)) == [options]


def test_processor_time_of_the_core_counts_its_threads_and_no_others() -> None:
    stop = threading.Event()

    def spin() -> None:
        name = ctypes.create_string_buffer(b"kvw-spin")
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name)
        while not stop.is_set():
            time.thread_time()

    before = core_s(os.getpid())
    spinner = threading.Thread(target=spin)
    spinner.start()
    own = time.thread_time()
    while core_s(os.getpid()) - before < 0.01 and time.thread_time() - own < _MOST_S:
        time.thread_time()
    counted = core_s(os.getpid()) - before
    stop.set()
    spinner.join()
    assert counted >= 0.01
    # This thread is not the core's.
    eventually(lambda: core_s(os.getpid()) <= before, "the other thread has ended")
