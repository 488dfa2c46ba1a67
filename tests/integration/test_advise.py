"""The live miss-ratio curve of a real daemon, and `kvwarehouse advise` on top of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.cli import main
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving

PAGE_BYTES = 16384
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=4, page_bytes=PAGE_BYTES
)
PAGES = 20


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="32MiB", nvme_capacity="64MiB", nvme_segment="4MiB") as serving:
        yield serving


@pytest.fixture
def client(serving: Serving) -> Iterator[kvw.Client]:
    with serving.connect() as client:
        yield client


def tokens(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + PAGES * SPACE.page_tokens))


def store(client: kvw.Client, number: int) -> None:
    rows = np.full((PAGES, PAGE_BYTES), number, np.uint8)
    assert client.open(SPACE).store(tokens(number), rows).stored == PAGES


def load(client: kvw.Client, number: int) -> None:
    out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    assert client.open(SPACE).load(tokens(number), out, timeout_s=30) == PAGES


def test_curve_has_each_use_at_the_size_that_it_takes(client: kvw.Client) -> None:
    for number in range(3):
        store(client, number)
    load(client, 0)
    eventually(lambda: client.miss_ratio(SPACE).uses >= 4 * PAGES, "the loads are seen")
    found = client.miss_ratio(SPACE)
    assert found.uses == 4 * PAGES
    assert found.share == 1.0
    assert found.hits_at(2 * PAGES * PAGE_BYTES) == 0.0
    assert found.hits_at(3.2 * PAGES * PAGE_BYTES) == PAGES
    assert client.miss_ratio().hits == found.hits


def test_namespace_that_is_not_there_is_refused(client: kvw.Client) -> None:
    other = kvw.Namespace(**{**SPACE.to_fields(), "model": "never opened"})
    with pytest.raises(kvw.UsageError):
        client.miss_ratio(other)


def test_advise_prints_tables_json_and_a_page(
    serving: Serving, client: kvw.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(client, 0)
    load(client, 0)
    eventually(lambda: client.miss_ratio().uses >= 2 * PAGES, "the loads are seen")
    address = ["--socket", serving.socket]
    page = tmp_path / "page.html"
    assert main(["advise", *address, "--prefill-tokens-per-s", "1000", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "50.0%" in said
    assert "busy s an hour" in said
    assert "Miss-ratio curve" in page.read_text(encoding="utf-8")
    assert main(["advise", "m", *address, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["uses"] == 2 * PAGES
    assert figures["now"]["hit_rate"] == 0.5


def test_advise_of_a_fresh_warehouse_says_that_it_has_seen_little(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", "--socket", serving.socket]) == 0
    assert "0 uses are few" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", [["--prefill-tokens-per-s", "0"], ["--dram-read", "0"], ["--nvme-read", "fast"]]
)
def test_rates_that_cannot_be_are_refused(serving: Serving, flags: list[str]) -> None:
    assert main(["advise", "--socket", serving.socket, *flags]) == 2
