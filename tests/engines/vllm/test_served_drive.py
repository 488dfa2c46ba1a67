"""`kvwarehouse drive` against the real `vllm serve`, the one of test_served.py."""

from __future__ import annotations

import json

import pytest

from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from vllm_rig.server import Server

BLOCK = 32


def test_drive_reports_what_vllm_streams_and_has_cached(
    server: Server, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    # Three documents of 625 tokens, asked about twice: the second time all whole blocks are cached.
    asked = ["document-qa", "--documents", "3", "--queries", "2", "--shrink", "16"]
    engine = ["--engine", f"http://127.0.0.1:{server.port}", "--model", "served"]
    prompts = ["--token-ids", "300:500", "--token-seed", str(seed), "--most-output-tokens", "5"]
    status = main(["drive", *asked, *engine, *prompts, "--concurrency", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == Exit.OK, found["failures"]
    assert found["requests"]["answered"] == 6
    assert found["requests"]["short"] == 0, "ignore_eos is taken"
    assert found["tokens"] == {
        "output": 6 * 5,
        "prompt": 6 * 625,
        "cached": 3 * (625 // BLOCK * BLOCK),
        "cached_share": pytest.approx(3 * 608 / (6 * 625)),
    }
    seconds = found["seconds"]
    assert [seconds[name]["count"] for name in ("ttft", "tpot", "whole")] == [6, 6, 6]
    assert seconds["itl"]["count"] <= 6 * 4, "tokens may come together, all of an answer too"
    assert 0 < seconds["ttft"]["p50"] <= seconds["ttft"]["max"] <= seconds["whole"]["max"]
