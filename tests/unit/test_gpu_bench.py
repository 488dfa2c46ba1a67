"""The parts of bench/gpu.py that need no GPU: what is judged, and what a page says of what did not
run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gpu
import pytest

from kvwarehouse.gpu import LoadPath, Machine, Rates
from kvwarehouse_bench.gpu import hbm, nvme, parts, ttft
from kvwarehouse_bench.gpu.goals import DIGEST, GPU_GOALS, HBM, NO_GPU, PartOutcome, lines_of
from kvwarehouse_bench.gpu.parts import TierRoom, room_of
from kvwarehouse_bench.gpu.report import BEGIN, END, with_outcomes
from kvwarehouse_bench.micro.figures import Figure, read_goal

ROOT = Path(__file__).resolve().parent.parent.parent
SAMPLE = ttft.GpuTtftSample(
    ttft.JUDGED_TOKENS,
    (10.0, 30.0, 20.0),
    {"dram": (0.5, 1.0, 2.0), "hbm": (0.25, 0.5, 1.0), "nvme": (2.0, 2.0, 2.0)},
)


def test_every_goal_can_be_judged() -> None:
    for wanted in GPU_GOALS:
        read_goal(wanted.goal, "%")


def test_what_has_not_run_is_listed_with_its_reason() -> None:
    lines = lines_of([PartOutcome("nvme", why_not=NO_GPU), PartOutcome("ttft", why_not="no torch")])
    assert [line[0] for line in lines] == [wanted.name for wanted in GPU_GOALS]
    told = {line[0]: line[2] for line in lines}
    assert told[nvme.NAME] == f"not measured: {NO_GPU}"
    assert told[ttft.NAME] == "not measured: no torch"
    assert {told[name] for name in (HBM, DIGEST)} == {"not measured: not run"}
    assert not any(line[3] for line in lines)


def test_the_slowest_size_from_hbm_is_judged_and_the_largest_share_of_the_digest() -> None:
    samples = [
        hbm.HbmSample(1 << 20, 1 << 30, (1.0, 1.0, 2.0), (0.9, 0.9, 0.9), (0.97, 0.97, 1.0)),
        hbm.HbmSample(8 << 20, 1 << 30, (1.0, 1.0, 1.0), (0.7, 0.7, 0.7), (0.9, 0.9, 0.9)),
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
    rates = Rates({LoadPath.GDS: 9.9e9, LoadPath.DRAM: 4e9}, {}, 1)
    outcome = nvme.outcome_of(rates, 10e9, loads, LoadPath.GDS)
    lines = {line[0]: line for line in lines_of([outcome])}
    assert lines[nvme.NAME][3] == verdict
    assert "ratio 0.40" in lines["NVMe to GPU, transfers alone, dram"][2]


def test_without_the_disks_own_rate_nothing_is_judged() -> None:
    assert nvme.outcome_of(Rates({LoadPath.GDS: 1e9}, {}, 1), 0.0, 1e9, LoadPath.GDS).why_not
    nothing = nvme.outcome_of(Rates({}, {LoadPath.GDS: "no cuFile"}, 1), 1e9, 1e9, LoadPath.DRAM)
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
    assert figures[f"first token at {ttft.JUDGED_TOKENS} tokens from HBM"].ratio == 40.0


def test_pool_is_for_the_longest_prompt_that_leaves_room_for_its_cache() -> None:
    each = ttft.SHAPES["8b"].kv_bytes_per_token
    lengths = [1 << 10, 32 << 10, 128 << 10]
    sizes = [ttft.hbm_bytes(tokens, each) for tokens in lengths]
    assert sizes[1] > 32768 * each
    assert ttft.pool_bytes(lengths, each, 3 * sizes[2]) == sizes[2]
    assert ttft.pool_bytes(lengths, each, 3 * sizes[2] - 1) == sizes[1]
    assert ttft.pool_bytes(lengths, each, 3 * sizes[0] - 1) == 0


def test_a_page_says_what_ran_and_what_did_not() -> None:
    ran = PartOutcome("ttft", ttft.figures_of([SAMPLE]), "131072 tokens do not fit")
    page = with_outcomes(
        f"# x\n{BEGIN}old\n{END}rest\n",
        {"driver": "CUDA 13.0"},
        ["a | b"],
        [PartOutcome("nvme", why_not=NO_GPU), ran],
    )
    assert "old" not in page
    assert page.endswith(f"{END}rest\n")
    assert "have run here: ttft." in page
    assert f"- `nvme` has not: {NO_GPU}." in page
    assert "131072 tokens do not fit" in page
    assert "| met |" in page


def test_the_document_has_the_marks() -> None:
    document = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "Lanes that have run here: " in document
    assert with_outcomes(document, {}, [], []) != document


# --- parts: one at a time, and one that fails


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs bench/gpu.py with these parts in place of its own: (exit status, docs/gpu.md)."""
    document = tmp_path / "gpu.md"
    document.write_text(f"{BEGIN}{END}")
    machine = Machine(cuda="13.0", devices=["H100"])
    monkeypatch.setattr(gpu, "probe_machine", lambda folder: machine)
    monkeypatch.setattr(gpu, "_DOCUMENT", document)

    def run(arguments: str, **played: Any) -> tuple[int, str]:
        for name, part in played.items():
            monkeypatch.setitem(parts.PARTS, name, part)  # type: ignore[arg-type]
        given = [*arguments.split(), "--write", "--out", str(tmp_path), "--dir", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["gpu.py", *given])
        return gpu.main(), document.read_text()

    return run


def found(part: str, value: float) -> Any:
    return lambda asked: PartOutcome(part, [Figure(part, value, "GB/s")])


def fails(asked: Any) -> PartOutcome:
    raise MemoryError("no 43 GB")


def test_a_part_that_fails_has_a_reason_and_the_others_go_on(bench: Any) -> None:
    parted = {"pinned": fails, "hbm": found("hbm", 7.0)}
    status, document = bench("--parts pinned,hbm", **parted)
    assert status == 1
    assert "`pinned` has not: MemoryError: no 43 GB." in document
    assert "have run here: hbm." in document


def test_what_a_part_found_is_in_the_report_of_later_parts(bench: Any) -> None:
    assert bench("--parts pinned", pinned=found("pinned", 5.0))[0] == 0
    status, document = bench("--parts hbm", hbm=found("hbm", 7.0))
    assert status == 0
    assert "have run here: pinned, hbm." in document
    assert "| pinned |  | 5 GB/s |" in document


def test_a_part_that_fails_again_keeps_what_it_found_before(bench: Any) -> None:
    bench("--parts pinned", pinned=found("pinned", 5.0))
    status, document = bench("--parts pinned", pinned=fails)
    assert status == 1
    assert "| pinned |  | 5 GB/s |" in document


def test_what_was_found_is_written_before_the_next_part_begins(bench: Any) -> None:
    def ends_the_process(asked: Any) -> PartOutcome:
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        bench("--parts pinned,hbm", pinned=found("pinned", 5.0), hbm=ends_the_process)
    _, document = bench("--parts ttft", ttft=found("ttft", 1.0))
    assert "have run here: pinned, ttft." in document


def test_figures_of_another_machine_are_not_in_the_report(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench("--parts pinned", pinned=found("pinned", 5.0))
    other = Machine(cuda="13.0", devices=["H200"])
    monkeypatch.setattr(gpu, "probe_machine", lambda folder: other)
    _, document = bench("--parts hbm", hbm=found("hbm", 7.0))
    assert "have run here: hbm." in document


@pytest.mark.parametrize("wrong", ["--parts pinned,disk", "--lengths few"])
def test_wrong_arguments_are_refused_before_anything_is_measured(bench: Any, wrong: str) -> None:
    def never(asked: Any) -> PartOutcome:
        raise AssertionError

    status, _ = bench(wrong, **dict.fromkeys(parts.PARTS, never))
    assert status == 2


def test_sizes_are_halved_until_the_tiers_fit() -> None:
    room = TierRoom(memory_bytes=3 << 30, disk_bytes=1 << 30)
    assert room.largest(512 << 20, 4, 0) == 512 << 20
    assert room.largest(1 << 30, 4, 0) == 512 << 20
    assert room.largest(4 << 30, 0, 2) == 512 << 20
    assert TierRoom(1 << 20, 1 << 20).largest(1 << 30, 4, 0) == 0


def test_prompts_that_no_tier_can_hold_are_left_out() -> None:
    """131072 tokens of a model of 8 billion take 43 GB of each tier."""
    per_token = ttft.SHAPES["8b"].kv_bytes_per_token
    lengths = [1024, 32768, 131072]
    assert TierRoom(100 << 30, 40 << 30).prompts(lengths, per_token) == [1024, 32768]
    assert TierRoom(41 << 30, 41 << 30).prompts(lengths, per_token) == lengths


def test_room_is_what_the_machine_has_free(tmp_path: Path) -> None:
    room = room_of(tmp_path)
    assert room.memory_bytes > 0
    assert room.disk_bytes > 0
