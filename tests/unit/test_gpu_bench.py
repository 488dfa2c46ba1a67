"""The parts of bench/gpu.py that need no GPU: what is judged, and what a page says of what did not
run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_bench import hbm, nvme, ttft
from gpu_bench.page import BEGIN, END, with_outcomes
from gpu_bench.wanted import DIGEST, HBM, NO_GPU, WANTED, Outcome, lines_of
from kvwarehouse.cli.bench.goals import read_goal
from kvwarehouse.gpu import Lane, Machine, Rates

ROOT = Path(__file__).resolve().parent.parent.parent
SAMPLE = ttft.Sample(ttft.JUDGED_TOKENS, (10.0, 30.0, 20.0), (0.5, 1.0, 2.0), (2.0, 2.0, 2.0))


def test_every_goal_can_be_judged() -> None:
    for wanted in WANTED:
        read_goal(wanted.goal, "%")


def test_what_has_not_run_is_listed_with_its_reason() -> None:
    lines = lines_of([Outcome("nvme", why_not=NO_GPU), Outcome("ttft", why_not="no torch")])
    assert [line[0] for line in lines] == [wanted.name for wanted in WANTED]
    told = {line[0]: line[2] for line in lines}
    assert told[nvme.NAME] == f"not measured: {NO_GPU}"
    assert told[ttft.NAME] == "not measured: no torch"
    assert {told[name] for name in (HBM, DIGEST)} == {"not measured: not run"}
    assert not any(line[3] for line in lines)


def test_the_slowest_size_from_hbm_is_judged_and_the_largest_share_of_the_digest() -> None:
    samples = [
        hbm.Sample(1 << 20, 1 << 30, (1.0, 1.0, 2.0), (0.9, 0.9, 0.9), (0.97, 0.97, 1.0)),
        hbm.Sample(8 << 20, 1 << 30, (1.0, 1.0, 1.0), (0.7, 0.7, 0.7), (0.9, 0.9, 0.9)),
    ]
    found = {figure.name: figure for figure in hbm.outcome_of(samples).figures}
    assert (found[HBM].verdict, found[HBM].ratio) == ("missed", 0.7)
    assert found[DIGEST].verdict == "missed"
    assert found[DIGEST].value == pytest.approx(10.0)
    found = {figure.name: figure for figure in hbm.outcome_of(samples[:1]).figures}
    assert (found[HBM].verdict, found[DIGEST].verdict) == ("met", "met")
    assert found[DIGEST].value == pytest.approx(3.0)


def test_a_part_that_was_not_run_is_not_passed_over() -> None:
    told = {line[0]: line[2] for line in lines_of([])}
    assert told[nvme.NAME] == "not measured: not run"


@pytest.mark.parametrize(("loads", "verdict"), [(9.5e9, "met"), (8.9e9, "missed")])
def test_verified_loads_are_judged_by_the_disk(loads: float, verdict: str) -> None:
    rates = Rates({Lane.GDS: 9.9e9, Lane.DRAM: 4e9}, {}, 1)
    outcome = nvme.outcome_of(rates, 10e9, loads, Lane.GDS)
    lines = {line[0]: line for line in lines_of([outcome])}
    assert lines[nvme.NAME][3] == verdict
    assert "ratio 0.40" in lines["NVMe to GPU, transfers alone, dram"][2]


def test_without_the_disks_own_rate_nothing_is_judged() -> None:
    assert nvme.outcome_of(Rates({Lane.GDS: 1e9}, {}, 1), 0.0, 1e9, Lane.GDS).why_not
    nothing = nvme.outcome_of(Rates({}, {Lane.GDS: "no cuFile"}, 1), 1e9, 1e9, Lane.DRAM)
    assert nothing.why_not == "no cuFile"


def test_no_part_starts_anything_without_a_gpu(tmp_path: Path) -> None:
    outcome = nvme.nvme(Machine(driver_error="no libcuda"), tmp_path, 1 << 20)
    assert "no libcuda" in outcome.why_not
    assert list(tmp_path.iterdir()) == []


def test_first_tokens_are_judged_by_the_median_of_the_rounds_ratios() -> None:
    figures = {figure.name: figure for figure in ttft.figures_of([SAMPLE])}
    judged = figures[ttft.NAME]
    assert judged.ratio == 20.0
    assert judged.verdict == "met"
    other = figures[f"first token at {ttft.JUDGED_TOKENS} tokens from NVMe"]
    assert other.ratio == 10.0
    assert other.verdict == ""


def test_a_page_says_what_ran_and_what_did_not() -> None:
    ran = Outcome("ttft", ttft.figures_of([SAMPLE]), "131072 tokens do not fit")
    page = with_outcomes(
        f"# x\n{BEGIN}old\n{END}rest\n",
        {"driver": "CUDA 13.0"},
        ["a | b"],
        [Outcome("nvme", why_not=NO_GPU), ran],
    )
    assert "old" not in page
    assert page.endswith(f"{END}rest\n")
    assert "have run here: ttft." in page
    assert f"- `nvme` has not: {NO_GPU}." in page
    assert "131072 tokens do not fit" in page
    assert "| met |" in page


def test_the_document_has_the_marks() -> None:
    document = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "Lanes that have run here: none." in document
    assert with_outcomes(document, {}, [], []) != document
