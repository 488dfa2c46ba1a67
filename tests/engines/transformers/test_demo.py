"""The demo tells the truth: it finds what is wrong, and says what it left out.

With a tiny model and the warehouse in memory; the real daemon is in test_real_daemon.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse as kvw

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-engines installs it")

from kvwarehouse_connectors.transformers.demo import command, run, subject, text
from kvwarehouse_connectors.transformers.demo.budget import PLAN_S, Budget, OutOfTimeError
from kvwarehouse_connectors.transformers.demo.pace import LENGTHS, Pace


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class MemoryDaemon:
    """Stands in for DemoDaemon; its warehouse outlives kills and has what the disk has."""

    def __init__(self, warehouse: Any) -> None:
        self.warehouse = warehouse
        self.kills = 0
        self.after_kill = lambda: None

    def __call__(self, kv_bytes: int, disk: str | None) -> MemoryDaemon:
        return self

    def __enter__(self) -> MemoryDaemon:
        return self

    def __exit__(self, *failure: object) -> None: ...

    def start(self) -> Any:
        return self.warehouse

    def kill(self) -> None:
        self.kills += 1
        self.after_kill()

    def stop(self) -> None: ...

    def drop_dram(self) -> None:
        self.warehouse.cold.update(self.warehouse.pages)


@pytest.fixture
def daemon(warehouse: Any, model: Any, monkeypatch: pytest.MonkeyPatch, torch: Any) -> MemoryDaemon:
    daemon = MemoryDaemon(warehouse)
    monkeypatch.setattr(run, "DemoDaemon", daemon)

    def built(source: str) -> subject.Subject:
        return subject.Subject(model, "tiny", lambda t: [ord(c) % 512 for c in t], str, True, 4096)

    monkeypatch.setattr(run, "built", built)
    return daemon


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_demo_prints_one_json_object_with_the_rows(
    daemon: MemoryDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--json", "--max-tokens", "2048"]) == 0
    said = answer(capsys)
    assert [set(row) for row in said["rows"]] == [
        {
            "prompt_tokens",
            "recompute_s",
            "dram_s",
            "dram_after_kill_s",
            "nvme_s",
            "logits_equal",
        }
    ] * 2
    assert [row["prompt_tokens"] for row in said["rows"]] == [1024, 2048]
    assert [row["tokens_reused"] for row in said["details"]] == [896, 1920]
    assert said["faults"] == []
    assert said["control_changed"] is True
    # The document grows: what is new in the second row begins in the chunk of the first question.
    assert said["pages_stored"] == 1024 // 64 + 1152 // 64
    assert said["bytes_stored"] == said["pages_stored"] * said["page_bytes"]
    assert said["shrunk"] is False
    assert daemon.kills == 4, "one in each run of each row"


def test_demo_shows_a_table_and_says_that_weights_are_random(
    daemon: MemoryDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--max-tokens", "1024"]) == 0
    said = capsys.readouterr().out
    assert "after kill -9" in said
    assert "1,024      896" in said
    assert "random, so the answers are noise" in said
    assert "FAULT" not in said


def test_demo_fails_when_a_tier_returns_other_bytes(
    daemon: MemoryDaemon, warehouse: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def flip() -> None:
        for key, whole in warehouse.pages.items():
            page = bytearray(whole)
            page[7] ^= 1
            warehouse.pages[key] = bytes(page)

    daemon.after_kill = flip
    assert command(["--json", "--max-tokens", "1024"]) == 4
    assert "1,024 tokens: the KV bytes differ" in answer(capsys)["faults"]


def test_demo_fails_when_a_tier_has_lost_pages(
    daemon: MemoryDaemon, warehouse: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recomputing what is missing gives the same bits, but it is not what the table claims."""
    daemon.after_kill = warehouse.pages.clear
    assert command(["--json", "--max-tokens", "1024"]) == 4
    said = answer(capsys)
    assert said["rows"][0]["logits_equal"] is True
    assert any("did not deliver" in fault for fault in said["faults"])


def test_demo_fails_when_the_nvme_column_came_from_dram(
    daemon: MemoryDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(daemon, "drop_dram", lambda: None)
    assert command(["--json", "--max-tokens", "1024"]) == 4
    assert any("did not deliver" in fault for fault in answer(capsys)["faults"])


def test_demo_has_two_runs_of_each_cell_and_shows_the_better(
    daemon: MemoryDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--json", "--max-tokens", "1024"]) == 0
    said = answer(capsys)
    for name in ("recompute", "dram", "dram_after_kill", "nvme"):
        runs = said["details"][0][f"{name}_runs_s"]
        assert len(runs) == 2
        assert said["rows"][0][f"{name}_s"] == min(runs)


def test_demo_fails_when_only_the_second_run_differs(
    daemon: MemoryDaemon, warehouse: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its time may be the one that is shown, so its bits count as much as the first one's."""

    def lose_the_second_time() -> None:
        if daemon.kills == 2:
            warehouse.pages.clear()

    daemon.after_kill = lose_the_second_time
    assert command(["--json", "--max-tokens", "1024"]) == 4
    assert any("did not deliver" in fault for fault in answer(capsys)["faults"])


def test_rows_are_left_out_on_a_slow_machine_and_the_demo_says_so(
    daemon: MemoryDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Pace(unit_s=10.0, piece_s=9.0, step_s=0.1, chunk_tokens=128)
    monkeypatch.setattr(run.pacing, "measure", lambda *given: slow)
    monkeypatch.setattr(Pace, "seen", lambda self, tokens, took_s: self)
    assert command(["--json"]) == 0
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert [row["prompt_tokens"] for row in said["rows"]] == [1024]
    assert said["shrunk"] is True
    assert "2,048 tokens would take about" in printed.err
    assert "--max-tokens 2048" in printed.err


@pytest.mark.parametrize(
    ("kill", "runs", "said"),
    [
        (2, {1024: 1}, "1,024 tokens: run 2 of 2 did not fit into the time"),
        (3, {1024: 2}, "2,048 tokens take longer than"),
        (4, {1024: 2, 2048: 1}, "2,048 tokens: run 2 of 2 did not fit into the time"),
    ],
    ids=["in the only row", "in the first run", "in the second run"],
)
def test_row_has_the_runs_for_which_there_was_time_when_the_machine_gets_busy(
    daemon: MemoryDaemon,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kill: int,
    runs: dict[int, int],
    said: str,
) -> None:
    clock = Clock()
    monkeypatch.setattr(run, "Budget", lambda started, unlimited: Budget(0.0, clock=clock))
    idle = Pace(unit_s=1e-9, piece_s=1e-9, step_s=1e-9, chunk_tokens=128)
    monkeypatch.setattr(run.pacing, "measure", lambda *given: idle)
    monkeypatch.setattr(Pace, "seen", lambda self, tokens, took_s: self)

    def become_busy() -> None:
        if daemon.kills == kill:
            clock.now_s = 1000.0

    daemon.after_kill = become_busy
    assert command(["--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert {row["prompt_tokens"]: row["runs"] for row in found["details"]} == runs
    assert found["faults"] == []
    assert found["shrunk"] is True
    assert said in printed.err


def test_first_row_is_measured_once_when_the_time_is_up_before_it(
    daemon: MemoryDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(run, "Budget", lambda started, unlimited: Budget(0.0, clock=clock))
    clock.now_s = 1000.0
    assert command(["--json"]) == 0
    said = answer(capsys)
    assert [row["prompt_tokens"] for row in said["rows"]] == [1024]
    assert [row["runs"] for row in said["details"]] == [1]
    assert said["control_changed"] is True


def test_budget_counts_from_the_start_of_the_command() -> None:
    clock = Clock()
    budget = Budget(-20.0, clock=clock)
    assert budget.spent_s == 20.0
    assert budget.fits(PLAN_S - 20.0)
    assert not budget.fits(PLAN_S - 19.0)
    clock.now_s = 1000.0
    with pytest.raises(OutOfTimeError):
        budget.check()


def test_budget_has_no_end_when_the_user_chose_the_length() -> None:
    clock = Clock()
    budget = Budget(0.0, unlimited=True, clock=clock)
    clock.now_s = 1e6
    assert budget.fits(1e6)
    budget.check()


def test_all_rows_fit_on_the_machine_they_were_fitted_to() -> None:
    pace = Pace(0.36, 0.35, 0.04, 128, start_s=1.5)
    assert sum(map(pace.row_s, LENGTHS, (0, *LENGTHS))) < PLAN_S


def test_pace_follows_the_machine_both_ways() -> None:
    pace = Pace(0.4, 0.4, 0.04, 128)
    expected_s = pace.prompt_s(2048)
    assert pace.seen(2048, 3 * expected_s).unit_s == pytest.approx(1.2)
    assert pace.seen(2048, expected_s / 2).step_s == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "100"], "--max-tokens 100 is too short"),
        (["--model", "/nowhere"], "--model /nowhere has no config.json"),
        (["--text", "/nowhere"], "--text /nowhere cannot be read"),
    ],
)
def test_bad_arguments_are_refused_with_the_value_and_the_fix(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(kvw.UsageError, match=message):
        command(arguments)


@pytest.fixture
def library_says(transformers: Any) -> Iterator[list[str]]:
    """What transformers logs: warnings of deprecated or unused arguments, say."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


@pytest.fixture
def checkpoint(
    model: Any, transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """With settings that the library warns of when they meet the demo's own."""
    monkeypatch.setattr(text, "VOCABULARY", 400)
    tokenizer = text.train_tokenizer(text.read_text(None)[:50_000])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=512
    ).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_demo_takes_a_checkpoint_with_its_own_tokenizer_and_nothing_is_warned_of(
    daemon: MemoryDaemon,
    checkpoint: Path,
    library_says: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(["--json", "--max-tokens", "1024", "--model", str(checkpoint)]) == 0
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert said["random_weights"] is False
    assert said["faults"] == []
    assert library_says == []
    assert "Loading weights" not in printed.err


def test_checkpoint_with_a_sliding_window_is_refused_by_name(
    transformers: Any, tmp_path: Any, daemon: MemoryDaemon
) -> None:
    config = transformers.MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=64,
    )
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = text.train_tokenizer("a text")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    with pytest.raises(kvw.UsageError, match="DynamicSlidingWindowLayer in layer 0"):
        command(["--model", str(tmp_path)])


def test_text_that_is_too_short_is_refused(daemon: MemoryDaemon, tmp_path: Any) -> None:
    short = tmp_path / "short.txt"
    short.write_text("hello")
    with pytest.raises(kvw.UsageError, match="the text has 5 tokens, the longest prompt 1024"):
        command(["--text", str(short), "--max-tokens", "1024"])


def test_prompts_share_the_document_and_end_in_different_questions() -> None:
    work = text.workload("x" * 600, lambda t: [ord(c) for c in t], 512)
    one, other = work.prompt(512, 0), work.prompt(256, 1)
    assert (len(one), len(other)) == (512, 256)
    assert text.common_tokens(one, other) == 256 - len(text.QUESTIONS[1])


def test_tokenizer_of_the_default_text_is_lossless_and_deterministic() -> None:
    source = text.read_text(None)
    one, other = text.train_tokenizer(source), text.train_tokenizer(source)
    ids = one.encode(source[:5000]).ids
    assert one.decode(ids) == source[:5000]
    assert ids == other.encode(source[:5000]).ids
    assert one.get_vocab_size() == text.VOCABULARY
