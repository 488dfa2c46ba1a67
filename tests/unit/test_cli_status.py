"""What `kvwarehouse status` says of a remote tier. The rest is tested with a real daemon."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.cli import status as command
from kvwarehouse.cli.main import main
from kvwarehouse.wire import fill, plain, status_pb2

REMOTE = {
    "url": "s3://kv/hot",
    "state": "refused",
    "reason": "AccessDenied: look at the policy of the bucket",
    "write": "reused",
    "capacity_bytes": 10 << 40,
    "used_bytes": 3 << 40,
    "objects": 12_345,
    "objects_max": 10_000_000,
    "nodes": 3,
    "puts": {"stored": 40, "not_in_dram": 2, "failed": 0},
    "put_bytes": 5 << 30,
    "worker_starts": 1,
    "listed_ago_s": -1.0,
    "ttl_days": 7,
    "read": "off",
}
READING = {
    "read": "on",
    "gets": {"filled": 30, "missing": 4, "late": 0},
    "get_bytes": 2 << 30,
    "damaged": {"digest": 2},
    "read_bytes_per_s": 90 << 20,
    "first_byte_ms": 12.4,
    "epochs_owed": 1,
    "epochs_ago_s": 3.0,
}


class Answering:
    """A client of a daemon that says one thing."""

    def __init__(self, status: dict[str, Any]) -> None:
        self._status = status

    def status(self) -> dict[str, Any]:
        return self._status


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(**parts: Any) -> str:
        told = plain(fill(status_pb2.Status(), {"name": "n", "state": "serving", **parts}))

        @contextlib.contextmanager
        def connected(_: Any) -> Iterator[Answering]:
            yield Answering(told)

        monkeypatch.setattr(command, "connect_from", connected)
        assert main(["status"]) == 0
        return capsys.readouterr().out

    return run


def test_status_says_what_is_left_of_the_write_budget_and_what_it_costs(said: Any) -> None:
    nvme = {"budget_bytes_per_day": 4 << 40, "budget_left_bytes": 1 << 40}
    core = {
        "tiers": {"nvme": nvme},
        "lookups": {"pages_hit_dram": 800, "pages_missed": 200},
        "stores": {"stored_again": {"write_budget": 50, "evicted": 70}},
    }
    text = said(core=core)
    assert "1 TiB left of 4 TiB a day" in text
    assert "5.0% of those looked up, at most" in text
    nvme["budget_left_bytes"] = -5
    assert "0 B left of 4 TiB a day" in said(core=core)
    assert "a day" not in said(core={"tiers": {"nvme": {}}})


def test_status_says_of_the_remote_tier_what_and_why_it_does_not_serve(said: Any) -> None:
    queue = {"queued_runs": 9, "dropped": {"queue_full": 7}}
    text = said(remote=REMOTE, core={"remote_puts": queue})
    for words in (
        "s3://kv/hot",
        "refused: AccessDenied: look at the policy of the bucket",
        "3 TiB of 10 TiB, 12,345 objects, for 7 days",
        "3, not listed yet",
        "stored 40, not_in_dram 2; 5 GiB",
        "queue_full 7",
    ):
        assert words in text, words
    assert "started" not in text


def test_status_says_that_the_worker_was_started_again_and_when_it_listed(said: Any) -> None:
    text = said(remote={**REMOTE, "worker_starts": 4, "listed_ago_s": 90.0}, core={})
    assert "started 4 times" in text
    assert "listed 00:01:30 ago" in text


def test_status_says_what_was_read_from_the_store_and_how_fast(said: Any) -> None:
    core = {
        "remote_fetches": {"queued": 2, "under_way": 5},
        "lookups": {"pages_hit_dram": 10, "pages_hit_remote": 80, "pages_missed": 10},
        "loads": {"pages_from_remote": 64},
    }
    text = said(remote={**REMOTE, **READING}, core=core)
    rows = {" ".join(line.split()) for line in text.splitlines()}
    for row in (
        "reads on, 90 MiB/s, the first byte after 12 ms",
        "runs read filled 30, missing 4; 2 GiB",
        "runs to read 7",
        "damaged objects digest 2",
        "clears known as of 3 s ago, 1 not told to the store yet",
        "probably in the store 80",
        "loaded from the store 64",
        "found 90 90.0% of 100 looked up",
        "hit in dram 10",
    ):
        assert row in rows, row


def test_rows_of_the_remote_tier_that_troubleshooting_names_are_there(said: Any) -> None:
    text = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(runs [\w ]+)`", text))
    rows = said(remote={**REMOTE, **READING}, core={}).splitlines()
    assert {"runs put", "runs read"} <= named
    for name in named:
        assert any(row.strip().startswith(f"{name} ") for row in rows), name


def test_status_counts_apart_what_are_pages_and_what_are_their_shards(said: Any) -> None:
    """Incident: two ranks stored 10 pages and dropped half of them, and it looked like all."""
    core = {
        "lookups": {"pages_hit_dram": 10},
        "loads": {"pages_loaded": 20, "failed": {"stale": 6}},
        "stores": {"pages_sealed": 5, "shards_stored": 10, "already": 4, "dropped": {"later": 10}},
    }
    pages, _, shards = said(core=core).partition("shards of pages since the start")
    rows = [{" ".join(line.split()) for line in part.splitlines()} for part in (pages, shards)]
    assert rows[0] >= {"found 10 100.0% of 10 looked up", "stored 5 0 B"}
    of_clients = {"loaded 20 0 B", "not loaded 6 stale 6", "stored 10", "stored before 4"}
    assert rows[1] >= of_clients | {"not stored 10 later 10"}
    assert not any("loaded" in row or "before" in row for row in rows[0])


def test_status_of_a_daemon_that_does_not_read_says_only_that(said: Any) -> None:
    text = said(remote=REMOTE, core={})
    assert "reads" in text
    assert not any(word in text for word in ("runs read", "clears", "damaged objects", "the store"))


def test_status_that_has_not_read_yet_says_so(said: Any) -> None:
    text = said(remote={**REMOTE, "read": "on", "epochs_ago_s": -1.0}, core={})
    rows = {" ".join(line.split()) for line in text.splitlines()}
    assert {"reads on", "runs read none yet", "clears not known yet"} <= rows


def test_status_of_a_daemon_without_a_remote_tier_does_not_speak_of_it(said: Any) -> None:
    assert "remote" not in said(core={})
