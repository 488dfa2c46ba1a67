"""A daemon with --remote: its worker begins and ends with it, and keeps it from nothing. Over the
models of the engine and of the worker."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.daemon import remote_process
from kvwarehouse.errors import UsageError
from kvwarehouse.fleet import FleetSecret
from kvwarehouse.remote.report import WorkerReport
from kvwarehouse.wire import status_pb2
from kvwarehouse.wire import warehouse_pb2 as pb
from kvwarehouse_bench.harness.eventually import eventually
from testkit import fake_worker
from testkit.fleet_secrets import secret_file
from testkit.served import Served


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "remote": "s3://bucket/prefix", "remote_capacity": "1GiB",
        "fleet_secret": secret_file(tmp_path), **more,
    }  # fmt: skip


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model of it, which says that it serves."""
    command = (sys.executable, "-P", fake_worker.__file__, str(tmp_path))
    monkeypatch.setattr(remote_process, "COMMAND", command)
    (tmp_path / "start-any").write_bytes(WorkerReport("serving").to_line() + b"report\n")
    return tmp_path


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def status_of(served: Served) -> status_pb2.Status:
    found: status_pb2.Status = served.stub.Status(pb.StatusRequest(), timeout=60).status
    return found


def test_worker_begins_and_ends_with_the_daemon_and_shows_in_its_status(worker: Path) -> None:
    with Served(worker, **settings(worker, remote_write="all")) as served:
        eventually(lambda: status_of(served).remote.state == "serving", "the tier serves")
        status = status_of(served).remote
        assert (status.url, status.write, status.worker_starts) == ("s3://bucket/prefix", "all", 1)
        fleet = FleetSecret.derive(bytes(32)).fleet_id
        options: Any = served.core.options
        assert (options.remote_write, options.remote_read) == ("all", True)
        assert options.remote_fleet == fleet
        pid = int((worker / "pids").read_text())
        assert lives(pid)
        served.stop()
        # It is killed, and one that takes longer to end than the daemon waits ends behind it.
        eventually(lambda: not lives(pid), "the worker has ended")


def test_daemon_without_a_remote_tier_starts_no_worker_and_has_no_status_of_one(
    worker: Path,
) -> None:
    with Served(worker) as served:
        assert not status_of(served).HasField("remote")
    assert not (worker / "pids").exists()


def test_worker_that_cannot_run_keeps_the_daemon_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_process, "COMMAND", (str(tmp_path / "nowhere"),))
    with Served(tmp_path, **settings(tmp_path)) as served:
        eventually(lambda: status_of(served).remote.state == "off", "the tier is off")
        assert "nowhere" in status_of(served).remote.reason
        assert status_of(served).state == "serving"


def test_missing_library_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(tmp_path / "given")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install"):
        Served(tmp_path / "daemon", **given).start()
    assert not (tmp_path / "daemon").exists()


def test_missing_extra_is_refused_where_it_is_needed(
    worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "obstore" else find(n))
    with (
        pytest.raises(UsageError, match=r"kvwarehouse\[remote\]"),
        Served(worker, **settings(worker)),
    ):
        pass
    assert not (worker / "arena").exists()
    with Served(worker):
        pass
