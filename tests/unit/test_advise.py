"""What `kvwarehouse advise` makes of a curve: rates, time, and what it counsels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwarehouse.miss_ratio import MissRatio
from kvwarehouse.planning.advise import ENOUGH_USES, NamespaceCurve, TierSetup, advise, outcome

GIB = 2**30
PAGE_BYTES = 2**20
TIERS = TierSetup(4 * GIB, 16 * GIB, dram_read=4e9, nvme_read=1e9, prefill_tokens_per_s=10_000.0)


def curve(*points: tuple[float, float], uses: int = 100_000, lost: int = 0) -> MissRatio:
    """points: GiB and hits."""
    sizes, hits = zip(*points, strict=True)
    return MissRatio(
        uses, lost, 3600.0, 1.0, tuple(int(size * GIB) for size in sizes), tuple(map(float, hits))
    )


def part(found: MissRatio, name: str = "model") -> NamespaceCurve:
    return NamespaceCurve(name, PAGE_BYTES, 16, found)


RISING = curve((1, 10_000), (4, 40_000), (8, 55_000), (16, 80_000))


def test_rates_are_those_of_the_curve_at_the_tiers_sizes() -> None:
    found = outcome([part(RISING)], TIERS)
    assert (found.dram_rate, found.either_rate) == (0.4, 0.8)


def test_either_tier_has_what_the_larger_of_the_two_holds() -> None:
    found = outcome([part(RISING)], TierSetup(8 * GIB, 4 * GIB, 4e9, 1e9))
    assert (found.dram_rate, found.either_rate) == (0.55, 0.55)


def test_time_is_that_of_loading_hits_and_computing_misses_in_an_hour() -> None:
    dram = 40_000 * PAGE_BYTES / 4e9
    nvme = 40_000 * PAGE_BYTES / 1e9
    computed = 20_000 * 16 / 10_000
    found = outcome([part(RISING)], TIERS)
    assert found.busy_s_per_hour == pytest.approx(dram + nvme + computed)


def test_nothing_is_said_of_time_where_the_prefill_rate_is_not_known() -> None:
    report = advise([part(RISING)], TierSetup(4 * GIB, 0, 4e9, 1e9), all_uses=100_000)
    assert outcome([part(RISING)], TierSetup(4 * GIB, 0, 4e9, 1e9)).busy_s_per_hour is None
    assert all("busy" not in column for table in report.tables for column in table.columns)


def test_namespaces_share_the_cache_and_their_hits_add_up() -> None:
    cold = part(curve((64, 0.0)), "cold")
    found = outcome([part(RISING), cold], TIERS)
    assert found.either_rate == 0.4


@pytest.mark.parametrize(
    ("points", "counsel"),
    [
        (((4, 40_000), (8, 55_000)), "twice the DRAM would add 15.0 points"),
        (((4, 40_000), (32, 47_000)), "less than a point, 8 times 7.0"),
        (((1, 30_000), (4, 40_000)), "more DRAM would add less than a point"),
        (((1, 40_000),), "half the DRAM would lose less than a point"),
    ],
)
def test_counsel_says_what_more_or_less_would_bring(
    points: tuple[tuple[float, float], ...], counsel: str
) -> None:
    report = advise([part(curve(*points))], TIERS, all_uses=100_000)
    assert counsel in report.summary


def test_tables_have_a_row_for_each_size_and_mark_the_present_one() -> None:
    report = advise([part(RISING)], TIERS, all_uses=100_000)
    dram, nvme = report.tables
    assert [row[2] for row in dram.rows].count("now") == 1
    assert [row[0] for row in dram.rows] == ["1 GiB", "2 GiB", "4 GiB", "8 GiB", "16 GiB", "32 GiB"]
    assert [row[1] for row in nvme.rows] == ["40.0%", "55.0%", "80.0%", "80.0%", "80.0%", "80.0%"]


def test_warehouse_without_nvme_has_no_table_of_it() -> None:
    assert (
        len(advise([part(RISING)], TierSetup(4 * GIB, 0, 4e9, 1e9), all_uses=100_000).tables) == 1
    )


def test_notes_warn_of_few_uses_of_lost_ones_and_of_those_without_a_curve() -> None:
    few = curve((4, 10), uses=100, lost=50)
    notes = " ".join(advise([part(few)], TIERS, all_uses=130).notes)
    assert f"{ENOUGH_USES:,}" in notes
    assert "too fast" in notes
    assert "30 uses were of other namespaces" in notes


def test_what_a_write_budget_costs_is_said_as_a_share_of_all_uses() -> None:
    bounded = replace(TIERS, nvme_bytes_per_day=500 * 10**9, missed_for_writes=1_300)
    report = advise([part(RISING)], bounded, all_uses=130_000)
    assert report.figures["write_budget"] == {"bytes_per_day": 500 * 10**9, "hit_rate_lost": 0.01}
    assert "1.0 points of hits at most" in " ".join(report.notes)
    none = advise([part(RISING)], replace(bounded, missed_for_writes=0), all_uses=0)
    assert "no hit so far" in " ".join(none.notes)
    assert "write_budget" not in advise([part(RISING)], TIERS, all_uses=1).figures


def test_warehouse_that_was_never_used_is_no_error() -> None:
    unused = MissRatio(0, 0, 0.0, 1.0, (), ())
    report = advise([part(unused)], TIERS, all_uses=0)
    assert report.figures["now"]["hit_rate"] == 0.0
    assert unused.hit_rate(GIB) == 0.0
