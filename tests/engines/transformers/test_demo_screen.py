"""What the demo looks like: bars on a terminal, plain lines elsewhere, and no word of others."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-engines installs it")

import torch
from rich.console import Console

from kvwarehouse_connectors.transformers import Reuse
from kvwarehouse_connectors.transformers.demo.outcome import (
    Cell,
    Control,
    Machine,
    Outcome,
    Row,
)
from kvwarehouse_connectors.transformers.demo.pace import Pace
from kvwarehouse_connectors.transformers.demo.progress import Teller
from kvwarehouse_connectors.transformers.demo.sample import Sample
from kvwarehouse_connectors.transformers.demo.show import Findings, machine_line

QUIET = Machine(cores=2, load=0.1)
BUSY = Machine(cores=2, load=7.25)
PACE = Pace(0.4, 0.35, 0.04, 128)


def sample(first_token_s: float, tier: str = "dram", loaded: int = 896) -> Sample:
    reuse = Reuse(tokens_matched=loaded, tokens_loaded=loaded, pages_by_tier={tier: loaded // 64})
    return Sample(first_token_s, reuse, torch.zeros(1, 4), "digest", (1, 2, 3))


def row(dram_s: float = 0.1) -> Row:
    computed = Cell((sample(2.0, loaded=0), sample(1.0, loaded=0)))
    dram, nvme = Cell((sample(dram_s), sample(0.5))), Cell((sample(0.25, "nvme"),) * 2)
    return Row(1024, 896, 64, computed, dram, dram, nvme)


def outcome(machine: Machine, *rows: Row) -> Outcome:
    other = replace(sample(1.0), logits=torch.ones(1, 4), answer=(1, 9, 3))
    return Outcome(
        rows=rows,
        control=Control(1024, 7, sample(1.0), other),
        model="tiny",
        random_weights=True,
        machine=machine,
        pace=PACE,
        asked_longest=1024,
        page_tokens=64,
        page_bytes=1000,
        pages_stored=16,
        total_s=99.0,
    )


def console(*, terminal: bool, columns: int = 80) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=columns, color_system=None)


def printed(out: Console) -> list[str]:
    assert isinstance(out.file, StringIO)
    return out.file.getvalue().splitlines()


@pytest.mark.parametrize("columns", [80, 120])
def test_row_has_a_bar_for_each_column_on_a_terminal(columns: int) -> None:
    out = console(terminal=True, columns=columns)
    Findings(out).row(row())
    head, *bars, _ = printed(out)
    assert head == "1,024 tokens, 896 of them reused: the same logits"
    assert [line[2:17].strip() for line in bars] == ["computed", "DRAM", "after kill -9", "NVMe"]
    lengths = [line.count("█") for line in bars]
    assert lengths[1] == lengths[2] < lengths[3] < lengths[0]
    assert lengths[0] == pytest.approx(10 * lengths[1], abs=9)
    assert [line.split()[-1] for line in bars] == ["s", "10x", "10x", "4.0x"]
    assert max(map(len, printed(out))) <= columns


def test_row_is_one_line_of_plain_text_without_a_terminal() -> None:
    out = console(terminal=False, columns=100)
    findings = Findings(out)
    findings.introduce()
    findings.row(row())
    heads, line = printed(out)[-2:]
    words = " ".join(heads.split()), " ".join(line.split())
    assert words[0] == "prompt reused computed DRAM after kill -9 NVMe same logits"
    assert words[1] == "1,024 896 1.00 0.10 (10x) 0.10 (10x) 0.25 (4.0x) yes"
    assert len(heads) == len(line)


def test_row_that_differs_says_so_and_the_end_has_the_fault() -> None:
    wrong = replace(row(), nvme=Cell((replace(sample(0.2, "nvme"), logits=torch.ones(1, 4)),)))
    out = console(terminal=True)
    findings = Findings(out)
    findings.row(wrong)
    findings.close(outcome(QUIET, wrong))
    said = "\n".join(printed(out))
    assert "DIFFERENT LOGITS" in said
    assert "logits are NOT equal" in said
    assert "FAULT     1,024 tokens: the logits differ" in said


@pytest.mark.parametrize(("dram_s", "explained"), [(0.1, False), (3.0, True)])
def test_row_that_is_not_faster_is_explained_with_the_load(dram_s: float, explained: bool) -> None:
    slow = Cell((sample(dram_s),))
    out = console(terminal=False, columns=500)
    Findings(out).close(outcome(BUSY, replace(row(), dram=slow)))
    said = "\n".join(printed(out))
    assert ("A row that is not faster means" in said) is explained
    assert ("load average 7.2 on 2 cores" in said) is explained


def test_rows_of_one_run_are_named() -> None:
    once = replace(row(), computed=Cell((sample(1.0, loaded=0),)))
    out = console(terminal=False, columns=500)
    Findings(out).close(outcome(QUIET, once))
    assert "but for 1,024 tokens: one run" in "\n".join(printed(out))


@pytest.mark.parametrize(("machine", "busy"), [(QUIET, False), (BUSY, True)])
def test_machine_that_is_busy_is_said_to_be(machine: Machine, busy: bool) -> None:
    assert ("busy with other work" in machine_line(machine, PACE)) is busy


def test_long_step_is_told_of_every_ten_seconds_without_a_terminal() -> None:
    now_s = [0.0]
    out = console(terminal=False)
    with Teller(out, clock=lambda: now_s[0]) as teller:
        teller.begin("8,192 tokens", 60.0)
        teller.step("computing", 30.0, calls=4)
        for now_s[0] in (9.0, 10.0, 11.0, 20.0):
            teller.tick()
    assert printed(out) == [
        "... 8,192 tokens, about 60 s",
        "... 8,192 tokens: computing, 50%",
        "... 8,192 tokens: computing, 100%",
    ]


def test_bar_moves_with_each_call_of_the_model_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = console(terminal=True)
    teller = Teller(out)
    seen: list[tuple[float, str]] = []

    def update(task: Any, **given: Any) -> None:
        seen.append((given["completed"], given["description"]))

    monkeypatch.setattr(teller._bar, "update", update)
    teller.begin("1,024 tokens", 40.0)
    teller.step("computing", 30.0, calls=3)
    teller.tick()
    teller.step("loading", 10.0)
    assert seen == [
        (0, "1,024 tokens"),
        (0.0, "1,024 tokens: computing"),
        (10.0, "1,024 tokens: computing"),
        (30.0, "1,024 tokens: loading"),
    ]
