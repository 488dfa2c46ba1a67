"""`kvwarehouse generate`: traces that read back in every format, equal for equal seeds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import Progress
from kvwarehouse.durations import format_duration, parse_duration
from kvwarehouse.errors import UsageError
from kvwarehouse.planning.replay import ReplaySetup, run_replay
from kvwarehouse.trace.file import ReadOptions, read_trace
from kvwarehouse.workloads.catalogue import KINDS
from kvwarehouse.workloads.trace_writer import write_lines

WAYS = [(name, form) for name, kind in KINDS.items() for form in kind.formats]


@pytest.fixture
def generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs it; returns the path of the trace and what --json printed."""
    count = iter(range(100))

    def run(workload: str, *arguments: str) -> tuple[Path, dict[str, Any]]:
        path = tmp_path / f"trace-{next(count)}.jsonl"
        given = ["generate", workload, "--out", str(path), "--json", "--progress", "0"]
        assert main([*given, *arguments]) == Exit.OK
        return path, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(("name", "form"), WAYS)
def test_trace_reads_back_as_what_was_made(generate: Any, name: str, form: str) -> None:
    path, said = generate(name, "--requests", "300", "--format", form)
    trace = read_trace(path)
    assert trace.format == form
    assert said["format"] == form
    assert trace.requests == said["requests"]
    assert trace.input_tokens.sum() == said["input_tokens"]
    assert trace.output_tokens.sum() == said["output_tokens"]
    tokens = trace.lengths * trace.block_tokens
    assert (trace.input_tokens <= tokens).all()
    assert (trace.input_tokens > tokens - trace.block_tokens).all()


@pytest.mark.parametrize("name", KINDS)
def test_same_seed_writes_the_same_bytes(generate: Any, name: str) -> None:
    paths = [generate(name, "--requests", "200", "--seed", seed)[0] for seed in ("3", "3", "4")]
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again
    assert (first == other) == (name in ("document-qa", "tiers"))


@pytest.mark.parametrize("name", ["chat", "agents", "system-prompts"])
def test_formats_of_one_workload_have_the_same_requests_and_reuse(generate: Any, name: str) -> None:
    """In blocks of other sizes: larger ones hit less, by what their ends share with nobody."""
    rates = {}
    for form in sorted(set(KINDS[name].formats) - {"weka"}):
        trace = read_trace(generate(name, "--requests", "600", "--format", form)[0])
        rates[form] = trace.input_tokens.tolist(), run_replay(trace, ReplaySetup()).hit_rate
    assert rates["bailian"][0] == rates["mooncake"][0]
    assert 0 < rates["mooncake"][1] <= rates["bailian"][1] + 0.02


def test_replay_of_a_workload_says_what_arithmetic_says(
    generate: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = generate("document-qa", "--documents", "6", "--queries", "3", "--order", "random")
    assert main(["replay", str(path), "--json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out)["hit_rate"] == pytest.approx(2 / 3)


def test_duration_bounds_the_clock_of_the_trace(generate: Any) -> None:
    path, said = generate("scan", "--duration", "30s", "--requests-per-s", "20")
    trace = read_trace(path)
    assert 20 < trace.times_s[-1] <= 30
    assert said["requests"] == pytest.approx(600, rel=0.2)


def test_weka_sessions_are_whole_and_have_their_sub_agents(generate: Any) -> None:
    path, said = generate("agents", "--requests", "800")
    sessions = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = [each.get("type") for session in sessions for each in session["requests"]]
    assert kinds.count("subagent") > 3
    assert all(session["hash_id_scope"] == "local" for session in sessions)
    last = read_trace(path, ReadOptions(session_gap_s=1.0))
    assert last.requests == said["requests"] >= 800


def test_trace_goes_to_the_disk_as_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    sizes = []

    def lines() -> Iterator[dict[str, Any]]:
        for at in range(20_000):
            sizes.append(path.stat().st_size)
            yield {"timestamp": at, "hash_ids": [at]}

    assert write_lines(str(path), lines()) == 20_000
    assert sizes[0] == 0
    assert path.stat().st_size - sizes[-1] < 100_000 < path.stat().st_size


def test_trace_that_is_not_whole_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "trace"

    def lines() -> Iterator[dict[str, Any]]:
        yield {"timestamp": 0}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_lines(str(path), lines())
    assert not path.exists()


def test_trace_to_the_standard_output_is_nothing_but_the_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "scan", "--out", "-", "--requests", "5"]) == Exit.OK
    printed = capsys.readouterr()
    assert len([json.loads(line) for line in printed.out.splitlines()]) == 5
    assert "5 requests" in printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sonnet"], "'sonnet' is no workload; there are chat"),
        (["chat", "--documents", "3"], "--documents is not for chat; its flags: --profile"),
        (["chat", "--profile", "x"], "--profile x cannot be; use one of conversation, synthetic"),
        (["chat", "--format", "weka"], "--format weka is not for chat"),
        (["chat", "--requests", "0"], "--requests 0"),
        (["chat", "--duration", "1w"], "--duration '1w'"),
        (["chat", "--duration", "0s"], "out of range"),
        (["chat", "--requests-per-s", "0"], "--requests-per-s 0"),
        (["agents", "--duration", "1h"], "--format mooncake"),
        (["document-qa", "--documents", "0"], "--documents 0 cannot be"),
        (["document-qa", "--documents", "-1"], "--documents -1 cannot be"),
        (["tiers", "--sets", "1,x"], "--sets 1,x cannot be"),
        (["tiers", "--sets", "0"], "--sets 0 cannot be"),
        (["scan", "--progress", "often"], "--progress 'often'"),
    ],
)
def test_generate_refuses_and_names_the_value(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    assert main(["generate", *arguments, "--out", str(path)]) == Exit.USAGE
    assert said in capsys.readouterr().err
    assert not path.exists()


def test_generate_does_not_write_over_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text("mine")
    assert main(["generate", "scan", "--out", str(path), "--requests", "1"]) == Exit.USAGE
    assert "give the path of a new file" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_help_lists_every_workload_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = capsys.readouterr().out
    for name, kind in KINDS.items():
        assert name in shown
        for setting in kind.settings:
            assert f"--{setting.replace('_', '-')}" in shown


def test_progress_speaks_when_its_time_has_come_and_not_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [100.0]
    progress = Progress(10.0, lambda: now[0])
    for at in (100.0, 109.0, 110.0, 111.0, 125.0):
        now[0] = at
        progress.tell(lambda: f"at {now[0]:.0f}")
    assert capsys.readouterr().err.splitlines() == ["at 110", "at 125"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("2h", 7_200), ("3d", 259_200), ("1.5", 1.5), ("250ms", 0.25)],
)
def test_duration_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert parse_duration(text, name="--x") == seconds


@pytest.mark.parametrize("text", ["", "-3s", "3 weeks", "inf", "1e9d", "0", "400d"])
def test_duration_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="--x"):
        parse_duration(text, name="--x")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (12.34, "12.3 s"), (3_661, "01:01:01"), (90_000, "1 d 01:00:00")],
)
def test_duration_is_shown_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
