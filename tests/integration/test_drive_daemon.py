"""`kvwarehouse drive --engine unix://...`: a real daemon, used as an engine would use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse_bench.harness.serving import Serving

PAGES = ("--page-bytes", "4KiB", "--progress", "0")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("disk")
    with Serving(folder, dram="32MiB", nvme_capacity="64MiB", nvme_segment="1MiB") as serving:
        yield serving


@pytest.fixture
def drive(serving: Serving, seed: int, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs it with token ids of the test's own; returns its exit status and what --json printed."""

    def run(source: str, *arguments: str) -> tuple[int, Any]:
        given = ["drive", source, "--engine", serving.address, *PAGES, "--json"]
        status = main([*given, "--token-seed", str(seed), *arguments])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_daemon_hits_what_arithmetic_says_and_every_page_is_right(drive: Any) -> None:
    documents = ("--documents", "5", "--queries", "3", "--question-tokens", "600")
    status, found = drive("document-qa", *documents, "--concurrency", "1")
    assert status == Exit.OK
    # 19 whole pages of each document are shared; one more is each prompt's own.
    pages = found["pages"]
    assert pages["asked"] == 15 * 20
    assert pages["hit_dram"] + pages["hit_nvme"] == pages["loaded"] == 10 * 19
    assert pages["stored"] == 5 * 19 + 15
    assert (pages["wrong"], pages["not_loaded"], pages["not_stored"]) == (0, {}, {})
    assert found["hit_rate"] == pytest.approx(190 / 300)
    seconds = found["seconds"]
    assert [seconds[name]["count"] for name in ("lookup", "load", "store")] == [15, 10, 15]
    assert seconds["load"]["p50"] > 0
    assert found["rates"]["loaded_bytes_per_load_s"] > 0


def test_second_drive_hits_all_that_the_first_has_stored(drive: Any) -> None:
    arguments = ("--requests", "20", "--concurrency", "2", "--seed", "3", "--shrink", "64")
    first = drive("scan", *arguments)[1]
    again = drive("scan", *arguments)[1]
    assert (first["hit_rate"], again["hit_rate"]) == (0.0, 1.0)
    assert again["pages"]["loaded"] == again["pages"]["asked"] == 20 * 16
    assert again["pages"]["stored"] == 0


def test_what_left_dram_is_hit_on_nvme(drive: Any, serving: Serving) -> None:
    arguments = ("--requests", "20", "--concurrency", "1", "--seed", "9")
    drive("scan", *arguments)
    with serving.connect_remote() as client:
        client.flush()
        client.evict(None, 100_000, "dram")
    again = drive("scan", *arguments)[1]
    assert again["tiers"]["nvme"]["hit_rate"] > 0.9
    assert again["pages"]["wrong"] == 0


def test_more_pages_than_the_buffer_are_loaded_and_stored_in_batches(
    drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvwarehouse.loadgen import warehouse

    monkeypatch.setattr(warehouse, "_BUFFER_BYTES", 3 * 4096)
    documents = ("--documents", "2", "--queries", "2", "--concurrency", "1")
    _, found = drive("document-qa", *documents)
    assert found["pages"]["stored"] == found["pages"]["loaded"] == 2 * 19
    assert found["pages"]["wrong"] == 0


def test_every_page_that_was_not_loaded_is_stored_or_said_to_be_dropped(drive: Any) -> None:
    """80 MiB of pages through 32 MiB of DRAM, by four threads."""
    _, found = drive("scan", "--requests", "20", "--concurrency", "4", "--page-bytes", "256KiB")
    pages = found["pages"]
    dropped = sum(pages["not_stored"].values())
    assert pages["stored"] + pages["already"] + dropped == pages["asked"] - pages["loaded"]


def test_table_and_page_say_where_pages_came_from(
    serving: Serving, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "drive.html"
    given = ["drive", "document-qa", "--engine", serving.address, *PAGES, "--html", str(page)]
    assert main([*given, "--token-seed", str(seed), "--speed", "1000"]) == Exit.OK
    shown = capsys.readouterr().out
    for word in ("hit in dram", "sent late", "lookup", "a load, GB/s", "wrong"):
        assert word in shown
    assert page.read_text().count("<svg") == 4


def test_no_daemon_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"unix://{tmp_path}/none.sock"
    assert main(["drive", "scan", "--engine", address, "--requests", "1"]) == Exit.NO_DAEMON
    assert "no daemon at" in capsys.readouterr().err
