"""What `kvwarehouse status` says of a remote tier. The rest is tested with a real daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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


def test_status_of_a_daemon_without_a_remote_tier_does_not_speak_of_it(said: Any) -> None:
    assert "remote" not in said(core={})
