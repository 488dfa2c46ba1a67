"""The benchmark's arithmetic: what is compared with what, in which order."""

from __future__ import annotations

from itertools import count

import pytest

from kvwarehouse.cli.bench import MEASURES
from kvwarehouse.cli.bench.figures import Figure, print_figures
from kvwarehouse.cli.bench.options import Options
from kvwarehouse.cli.bench.rounds import Rounds, alternate


def test_rounds_alternate_which_side_goes_first_after_one_to_warm_up() -> None:
    order: list[str] = []
    seconds = count(1)

    def side(name: str) -> float:
        order.append(name)
        return float(next(seconds))

    rounds = alternate(2, lambda: side("ours"), lambda: side("limit"))
    assert order == ["ours", "limit", "ours", "limit", "limit", "ours"]
    assert (rounds.ours, rounds.limit) == ([3, 6], [4, 5])


def test_speed_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    assert Rounds([2, 4, 100], [1, 3, 100]).speed_ratio == 0.75
    assert Rounds([2, 4, 100], [1, 3, 100]).ours_s == 4


def test_figure_without_a_limit_has_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    bare, compared = Figure("a", 5, "us"), Figure("b", 5, "us", limit=10)
    assert (bare.ratio, compared.ratio) == (None, 0.5)
    print_figures([bare, compared], {"machine": "m"})
    assert "0.50" in capsys.readouterr().out


def test_daemon_of_a_bench_has_room_for_what_is_moved() -> None:
    options = Options(rounds=9, page_bytes=2 << 20, pages=128, nvme_dir=None)
    assert options.dram_bytes > 2 * options.moved_bytes
    assert options.nvme_bytes > 2 * options.moved_bytes


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_has_its_module(name: str) -> None:
    pytest.importorskip("kvwarehouse.engine._native", reason="the core is not built")
    module = __import__(f"kvwarehouse.cli.bench.{name}", fromlist=["measure"])
    assert callable(module.measure)
