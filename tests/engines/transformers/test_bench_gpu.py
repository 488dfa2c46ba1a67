"""The part of bench/gpu.py that measures first tokens, on the CPU with a small model: every round
takes the prompt from where it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwarehouse_bench.gpu import ttft


def test_first_tokens_are_timed_from_each_tier(tmp_path: Path) -> None:
    outcome = ttft.ttft("cpu", ttft.SHAPES["tiny"], [1024, 2048], 1, tmp_path)
    assert outcome.why_not == ""
    assert len(outcome.figures) == 4
    assert all(figure.value > 0 and figure.limit for figure in outcome.figures)


def test_a_prompt_that_came_from_elsewhere_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttft, "_COMPUTED_TOKENS", 0)
    with pytest.raises(RuntimeError, match="tokens were loaded"):
        ttft.ttft("cpu", ttft.SHAPES["tiny"], [1024], 1, tmp_path)
