"""The write budget of the NVMe tier, on real daemons: what it lets be written, over restarts, and
what people are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_bench.harness.serving import Serving

PAGE_TOKENS = 4
PAGE_BYTES = 64 * 1024
RECORD_BYTES = PAGE_BYTES + 4096
PAGES = 10
DAY_PAGES = 100
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="f", layout="t/1", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES
)


def thrifty(tmp_path: Path, records: float = DAY_PAGES) -> Serving:
    budget = f"{int(records * RECORD_BYTES)}B"
    return Serving(tmp_path, dram="32MiB", nvme_capacity="128MiB", nvme_writes_per_day=budget)


def prompt(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + PAGES * PAGE_TOKENS))


def store(client: kvw.Client, *numbers: int) -> None:
    ns = client.open(SPACE)
    for number in numbers:
        pages = np.ones((PAGES, PAGE_BYTES), np.uint8)
        assert ns.store(prompt(number), pages, timeout_s=DEADLINE_S).stored == PAGES


def use(client: kvw.Client, number: int) -> None:
    ns = client.open(SPACE)
    ns.load(prompt(number), np.empty((PAGES, PAGE_BYTES), np.uint8))


def nvme(client: kvw.Client) -> dict[str, Any]:
    return client.status()["core"]["tiers"]["nvme"]


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_new_pages_get_half_of_the_budget_and_used_ones_the_rest_over_restarts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with thrifty(tmp_path) as serving:
        with serving.connect() as client:
            store(client, *range(8))
            # Half of it, and what was queued when that was known.
            until(lambda: nvme(client)["written_records"] >= DAY_PAGES // 2)
            written = nvme(client)["written_records"]
            assert written < 8 * PAGES
            assert nvme(client)["not_admitted"]["write_budget"] == 8 * PAGES - written
            use(client, 7)
            until(lambda: nvme(client)["written_records"] >= written + PAGES)
            left_bytes = nvme(client)["budget_left_bytes"]
            assert 0 < left_bytes <= DAY_PAGES * RECORD_BYTES // 2
            assert main(["status", "--address", serving.address]) == 0
            assert "left of" in capsys.readouterr().out
        metrics = serving.metrics()
        assert metrics["kvwarehouse_nvme_write_budget_bytes"] == DAY_PAGES * RECORD_BYTES
        serving.stop()
        serving.start()
        with serving.connect() as client:
            again = nvme(client)
            assert again["budget_bytes_per_day"] == DAY_PAGES * RECORD_BYTES
            # What the exit flushed is spent too; a second of a day brings little.
            assert again["budget_left_bytes"] < left_bytes + RECORD_BYTES
            assert client.open(SPACE).lookup(prompt(7)).pages == PAGES


def test_flush_goes_as_far_as_the_budget_and_says_what_is_in_dram_alone(tmp_path: Path) -> None:
    with thrifty(tmp_path, 20) as serving, serving.connect() as client:
        store(client, *range(6))
        flushed = client.flush(DEADLINE_S)
        assert flushed.pending == 0
        assert 20 <= flushed.flushed <= 21
        assert flushed.not_admitted == 6 * PAGES - flushed.flushed
        assert client.flush(DEADLINE_S).not_admitted == flushed.not_admitted


def test_page_that_the_budget_kept_from_nvme_is_told_so_and_written_the_next_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with thrifty(tmp_path, 1_000_000) as serving:
        serving.stop()
        serving.settings["nvme_writes_per_day"] = f"{30 * RECORD_BYTES}B"  # of it 30 are left
        serving.start()
        with serving.connect() as client:
            ns = client.open(SPACE)
            store(client, *range(3))
            number = 3
            while ns.lookup(prompt(2)).pages:
                store(client, number)
                number += 1
                assert number < 200
            (why,) = client.why(prompt(2), space=ns).namespaces
            assert {each.reason for each in why.runs if each.state == "left"} == {"write_budget"}
            store(client, 2)
            counts = client.status()["core"]["stores"]["stored_again"]
            assert counts["write_budget"] == PAGES
            assert main(["advise", "--address", serving.address]) == 0
            assert "points of hits at most" in capsys.readouterr().out


def test_daemon_without_a_budget_says_nothing_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Serving(tmp_path, nvme_capacity="64MiB") as serving:
        with serving.connect() as client:
            assert nvme(client)["budget_bytes_per_day"] == 0
        assert main(["status", "--address", serving.address]) == 0
        assert "a day" not in capsys.readouterr().out
