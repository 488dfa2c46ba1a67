"""Two real daemons of one fleet, with a folder as its store: a clear on one is one on the other,
whatever ends in between. Every step of it is in tests/unit/test_clears_of_fleets.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse import cli
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.fleet import FleetSecret
from kvwarehouse.remote.names import EVERYTHING, FleetNames, PagesName
from kvwarehouse_bench.harness.eventually import eventually
from testkit.fleet_secrets import secret_file
from testkit.quick_remote import QuickServing
from testkit.remote_host import TakenFolder, names_in, object_paths

NAMES = FleetNames(FleetSecret.derive(bytes(32)).fleet_id)
PAGE_TOKENS, PAGE_BYTES, RUN_PAGES = 16, 4096, 16
SPACE, OTHER = (
    kvw.Namespace(
        model=model, weights="w", dtype="f", layout="t/1", page_tokens=PAGE_TOKENS,
        page_bytes=PAGE_BYTES,
    )
    for model in ("m", "o")
)  # fmt: skip
TOKENS = list(range(RUN_PAGES * PAGE_TOKENS))
PAGES = np.random.default_rng(1).integers(0, 255, (RUN_PAGES, PAGE_BYTES), np.uint8)


class Host:
    def __init__(self, folder: Path, shared: Path) -> None:
        folder.mkdir()
        self.serving = QuickServing(
            folder, fleet_secret=secret_file(folder), remote=f"file://{shared}",
            remote_capacity="1GiB", remote_write="all",
        )  # fmt: skip
        self.client: Any = None

    def start(self) -> None:
        self.serving.start()
        self.client = self.serving.connect()

    def kill(self) -> None:
        self.client.close()
        self.serving.kill()

    def remove(self) -> None:
        if self.client is not None:
            self.client.close()
        self.serving.remove()

    def store(self, space: kvw.Namespace = SPACE) -> None:
        opened = self.client.open(space)
        assert opened.store(TOKENS, PAGES).stored == RUN_PAGES

    def has(self, space: kvw.Namespace = SPACE) -> int:
        return int(self.client.open(space).lookup(TOKENS).pages)

    def clear(self, space: kvw.Namespace | None = SPACE, **options: Any) -> str:
        return str(self.client.clear(space, all=space is None, **options).remote)

    def owed(self) -> int:
        """Clears that the store does not have yet."""
        return int(self.client.status()["remote"]["epochs_owed"])

    def worker(self) -> int:
        """The pid of one that runs."""

        def runs() -> int:
            started = self.serving.events("remote_worker_started")
            ended = self.serving.events("remote_worker_ended")
            return int(started[-1]["pid"]) if len(started) > len(ended) else 0

        return int(eventually(runs, "a worker runs"))


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shared"
        self.folder.mkdir()
        self.taken = TakenFolder(self.folder)
        self.hosts = [Host(folder / name, self.folder) for name in ("first", "second")]

    def markers(self, space: bytes = SPACE.id) -> list[int]:
        found = [NAMES.epoch_of(name) for name in names_in(self.folder)]
        return sorted(of[1] for of in found if of and of[0] == space)

    def objects(self) -> list[PagesName]:
        return list(object_paths(self.folder, NAMES))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    for host in made.hosts:
        host.start()
    yield made
    for host in made.hosts:
        host.remove()


def test_clear_on_one_host_clears_the_other_and_what_is_put_is_of_the_new_epoch(
    fleet: Fleet,
) -> None:
    first, second = fleet.hosts
    for host in fleet.hosts:
        host.store()
        host.store(OTHER)
    eventually(lambda: {name.epoch for name in fleet.objects()} == {0}, "they are put")
    eventually(lambda: first.clear() == "done", "the store has a clear")
    assert first.has() == 0
    eventually(lambda: second.has() == 0, "the other host follows")
    assert [host.has(OTHER) for host in fleet.hosts] == [RUN_PAGES] * 2
    eventually(lambda: second.serving.said("remote_cleared"), "and says so")
    epoch = fleet.markers()[-1]

    def is_put() -> bool:
        # Where the store was slow the first clear was owed, and the other host may be yet to follow
        # the last one.
        second.client.open(SPACE).store(TOKENS, PAGES)
        return epoch in {name.epoch for name in fleet.objects() if name.namespace == SPACE.id}

    eventually(is_put, "what is stored now is put under the new epoch")
    assert second.has() == RUN_PAGES


def test_clear_without_a_worker_is_owed_and_written_by_the_next_daemon(fleet: Fleet) -> None:
    first, second = fleet.hosts
    for host in fleet.hosts:
        host.store()
    os.kill(first.worker(), signal.SIGKILL)
    fleet.taken.take()  # so that the next worker has nothing to write to
    assert first.clear() == "owed"
    first.kill()
    fleet.taken.give_back()
    assert fleet.markers() == []
    assert second.has() == RUN_PAGES
    first.start()
    eventually(lambda: len(fleet.markers()) == 1, "the clear is in the store")
    eventually(lambda: second.has() == 0, "the other host follows")
    assert first.has() == 0
    assert first.serving.events("remote_cleared") == []
    # The marker is there before the daemon hears of it, and before its file says so: a clear of
    # another namespace is noted there with all else that is known.
    eventually(lambda: first.owed() == 0, "it knows that the store has it")
    first.client.open(OTHER)
    first.clear(OTHER)
    first.kill()
    first.start()
    eventually(lambda: first.clear(OTHER) == "done", "it reaches the store")
    assert len(fleet.markers()) == 1  # it was owed once


def test_owed_clear_of_a_namespace_that_was_forgotten_is_written(fleet: Fleet) -> None:
    first, second = fleet.hosts
    for host in fleet.hosts:
        host.store()
    fleet.taken.take()
    assert first.clear(forget=True) == "owed"
    first.kill()
    fleet.taken.give_back()
    first.start()
    eventually(lambda: second.has() == 0, "the other host follows")
    assert len(fleet.markers()) == 1
    first.store()  # it is opened again, and is of the fleet's epoch
    epoch = fleet.markers()[-1]
    eventually(lambda: epoch in {name.epoch for name in fleet.objects()}, "it is put")


def test_clear_of_everything_reaches_what_the_host_has_never_seen(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = fleet.hosts
    second.store(OTHER)
    monkeypatch.setenv("KVW_ADDRESS", first.serving.address)

    def said() -> str:
        status = cli.main(["clear", "--all", "--yes"])
        out = capsys.readouterr().out
        is_done = "and of the fleet's hosts and store" in out
        assert status == (Exit.OK if is_done else Exit.FOUND)
        return out if is_done else ""

    eventually(said, "the store has a clear")
    eventually(lambda: second.has(OTHER) == 0, "the other host follows")
    assert fleet.markers(EVERYTHING) != []
    fleet.taken.take()
    eventually(lambda: first.clear(None) == "owed", "the store does not answer")
    assert cli.main(["clear", "--all", "--yes"]) == Exit.FOUND
    assert "the fleet's store did not answer" in capsys.readouterr().out


def test_host_that_was_away_follows_when_it_is_back(fleet: Fleet) -> None:
    first, second = fleet.hosts
    for host in fleet.hosts:
        host.store()
    second.kill()
    eventually(lambda: first.clear() == "done", "the store has a clear")
    second.start()
    eventually(lambda: second.has() == 0, "it follows")
    second.store()
    second.kill()
    second.start()
    second.client.open(OTHER)
    eventually(lambda: second.clear(OTHER) == "done", "it has listed")
    assert second.has() == RUN_PAGES  # and follows once
