"""A real daemon with a folder as its remote tier: what gets there, and what becomes of the daemon
when something fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse import core
from kvwarehouse.remote.names import PagesName
from kvwarehouse_bench.harness.eventually import eventually
from testkit.quick_remote import STORE_DAY, ahead_of_midnight_s
from testkit.remote_host import (
    RECORD_BYTES,
    RUN_PAGES,
    SECRET,
    RemoteHost,
    TakenFolder,
)


def fault_of(name: PagesName, data: bytes) -> str:
    fault, pages, record_bytes = core.check_object(
        SECRET.fleet_id, SECRET.secret, name.namespace, name.epoch, name.key, data
    )
    assert fault or (pages, record_bytes) == (RUN_PAGES, RECORD_BYTES)
    return fault


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., RemoteHost]]:
    made: list[RemoteHost] = []

    def serve(*, environment: dict[str, str] | None = None, **settings: Any) -> RemoteHost:
        tier = RemoteHost(tmp_path, **settings)
        made.append(tier)
        tier.serving.environment |= environment or {}
        tier.start()
        return tier

    yield serve
    for tier in made:
        tier.remove()


def test_prompt_that_is_used_twice_is_put_as_one_object_and_others_are_not(
    served: Callable[..., RemoteHost],
) -> None:
    tier = served()
    tier.until_state("serving")
    tier.store(1, 2, 3)
    tier.use(2)

    def used_again(prompt: int, objects: int) -> dict[str, Any]:
        """Uses that come in one second are one."""
        tier.use(prompt)
        return tier.status if tier.status["puts"] == {"stored": objects} else {}

    status = eventually(lambda: used_again(1, 1), "the first was put")
    ((name, data),) = tier.objects().items()
    assert fault_of(name, data) == ""
    assert (name.epoch, name.day) == (0, STORE_DAY)
    assert status["put_bytes"] == status["used_bytes"] == len(data) == RUN_PAGES * RECORD_BYTES
    assert (status["objects"], status["nodes"]) == (1, 1)
    eventually(lambda: used_again(2, 2), "the second was put")
    assert len(tier.objects()) == 2
    assert {fault_of(*each) for each in tier.objects().items()} == {""}


def test_all_are_put_when_they_are_stored_where_that_is_asked_for(
    served: Callable[..., RemoteHost],
) -> None:
    tier = served(remote_write="all")
    tier.store(1, 2)  # before there is a worker, too
    tier.until(lambda status: status["puts"] == {"stored": 2}, "both were put")
    tier.store(3)
    tier.until(lambda status: status["puts"] == {"stored": 3}, "the third was put")
    assert {fault_of(*each) for each in tier.objects().items()} == {""}


def test_nothing_is_put_where_that_is_asked_for(served: Callable[..., RemoteHost]) -> None:
    tier = served(remote_write="none")
    tier.until_state("serving")
    tier.store(1)
    tier.use(1, 1, 1)
    starts = tier.status["listed_ago_s"]
    tier.until(lambda status: status["listed_ago_s"] > starts + 3, "the worker went its rounds")
    assert tier.status["puts"] == {}
    assert tier.objects() == {}


def test_worker_that_is_killed_is_followed_by_another_and_the_daemon_serves_on(
    served: Callable[..., RemoteHost],
) -> None:
    tier = served(remote_write="all")
    tier.store(1)
    tier.until(lambda status: status["puts"] == {"stored": 1}, "the first was put")
    first = tier.worker()
    os.kill(first, signal.SIGKILL)
    tier.use(1)
    tier.until(lambda status: status["worker_starts"] == 2, "another worker runs")
    (ended,) = tier.serving.events("remote_worker_ended")
    assert (ended["pid"], ended["exit_code"]) == (first, -9)
    tier.store(2)
    status = tier.until(lambda status: status["puts"].get("stored") == 2, "the second was put")
    assert status["put_bytes"] == 2 * RUN_PAGES * RECORD_BYTES
    tier.use(1, 2)
    assert len(tier.objects()) == 2


def test_worker_that_hangs_is_killed_and_replaced(served: Callable[..., RemoteHost]) -> None:
    tier = served(environment={"KVW_TEST_SILENT_LOOKS": "3"})
    tier.until_state("serving")
    first = tier.worker()
    os.kill(first, signal.SIGSTOP)
    tier.until(lambda status: status["worker_starts"] >= 2, "another worker runs")
    assert not lives(first)
    assert "said nothing" in tier.serving.events("remote_worker_ended")[0]["text"]
    tier.until_state("serving")


def test_store_that_takes_nothing_is_failing_and_the_daemon_serves_on(
    served: Callable[..., RemoteHost],
) -> None:
    tier = served(remote_write="all")
    tier.until_state("serving")
    fleets = TakenFolder(tier.folder / "v1")
    fleets.take()
    for prompt in range(1, 9):
        tier.store(prompt)
    status = tier.until_state("failing")
    assert str(tier.folder) in status["reason"]
    assert status["puts"].get("failed", 0) + status["breaker_opened"] > 0
    tier.use(*range(1, 9))
    assert tier.client.status()["state"] == "serving"
    eventually(lambda: tier.serving.events("remote_failing"), "the state has lasted")
    fleets.give_back()
    tier.until_state("serving")
    tier.store(9)
    tier.until(lambda status: status["puts"].get("stored", 0) > 0, "puts go on")


def test_folder_that_is_not_mounted_keeps_the_daemon_from_nothing(
    served: Callable[..., RemoteHost], tmp_path: Path
) -> None:
    mount = tmp_path / "mount"
    tier = served(remote=f"file://{mount}", remote_write="all")
    tier.store(1)
    tier.use(1)
    assert str(mount) in tier.until_state("failing")["reason"]
    mount.mkdir()
    tier.until(lambda status: status["puts"] == {"stored": 1}, "what waited is put")


def test_capacity_of_the_fleet_is_not_exceeded(served: Callable[..., RemoteHost]) -> None:
    object_bytes = RUN_PAGES * RECORD_BYTES
    tier = served(remote_write="all", remote_capacity=str(10 * object_bytes))
    tier.until_state("serving")
    for prompt in range(20):
        tier.store(prompt)
    status = tier.until_state("full")
    assert "--remote-capacity" in status["reason"]
    tier.until(lambda status: sum(status["puts"].values()) == 20, "all were looked at")
    assert 0 < len(tier.objects()) * object_bytes <= 10 * object_bytes
    assert tier.status["puts"]["no_room"] == 20 - len(tier.objects())


def test_stop_of_the_daemon_leaves_no_worker(served: Callable[..., RemoteHost]) -> None:
    tier = served()
    tier.until_state("serving")
    worker = tier.worker()
    assert tier.stop() == 0
    # It is killed, and one that takes longer to end than the daemon waits ends behind it.
    eventually(lambda: not _runs(worker), "the worker has ended")


def test_daemon_that_is_killed_leaves_no_worker(served: Callable[..., RemoteHost]) -> None:
    tier = served()
    tier.until_state("serving")
    worker = tier.worker()
    tier.serving.kill()
    eventually(lambda: not _runs(worker), "the worker has ended")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"  # nobody may be there to bury it


def test_daemon_that_starts_again_knows_what_is_in_the_store(
    served: Callable[..., RemoteHost],
) -> None:
    tier = served(remote_write="all")
    tier.store(1)
    tier.until(lambda status: status["puts"] == {"stored": 1}, "it was put")
    tier.stop()
    tier.start()
    status = tier.until_state("serving")
    assert (status["objects"], status["puts"]) == (1, {})
    tier.use(1, 1)
    tier.store(2)
    tier.until(lambda status: status["puts"] == {"stored": 1}, "the new one alone was put")
    assert len(tier.objects()) == 2


def test_what_is_used_after_midnight_gets_its_new_day_and_not_a_minute_sooner(
    served: Callable[..., RemoteHost],
) -> None:
    tier = served(remote_write="all")
    tier.store(1)
    tier.until(lambda status: status["puts"] == {"stored": 1}, "it was put")
    (first,) = tier.objects()
    tier.stop()
    tier.serving.environment["KVW_TEST_STORE_AHEAD_S"] = str(ahead_of_midnight_s(5))
    tier.start()
    tier.until_state("serving")

    def refreshed() -> dict[str, Any]:
        tier.use(1)
        return dict(tier.status["puts"])

    assert eventually(refreshed, "it was used after midnight") == {"refreshed": 1}
    assert {name.day for name in tier.objects()} == {first.day, first.day + 1}
