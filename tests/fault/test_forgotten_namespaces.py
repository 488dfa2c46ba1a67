"""A namespace is forgotten, by an operator or to make room for another: its place goes on, and
nothing of it comes back, whatever dies, is detached or is lost meanwhile.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse.daemon import identity, ledger_file
from kvwarehouse.daemon.ledger import Ledger
from kvwarehouse.daemon.logs import Log
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from testkit import tally
from testkit.known_prompt import KnownPrompt

LONG = tally.rounds(1) > 1  # `make faults`
pytestmark = pytest.mark.timeout(900 if LONG else 240)

BOUND = 3  # namespaces
SIZES = {"dram": "16MiB", "nvme_capacity": "32MiB", "nvme_segment": "2MiB", "grace_s": "0.1"}
KEPT, GONE, IDLE, NEXT = (KnownPrompt(name, pages=6, page_bytes=20_000) for name in "abcd")
STEPS = 12

# A daemon of few namespaces, which kills itself at a step of forgetting one.
PROGRAM = f"""
import os, signal, sys
from kvwarehouse.cli import main
from kvwarehouse.daemon import epoch_file, ledger, ledger_file
from kvwarehouse.daemon.warehouse import DaemonWarehouse

ledger.MAX_NAMESPACES = {BOUND}
left = int(os.environ.get("DIE_AT", "-1"))
forgetting = False

def step():
    global left
    if forgetting:
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

def stepping(call):
    def stepped(*args, **named):
        step()
        result = call(*args, **named)
        step()
        return result
    return stepped

class Core:
    def __init__(self, core):
        self.core = core
    def __getattr__(self, name):
        return stepping(getattr(self.core, name))

plain = DaemonWarehouse._forget

def forget(self, *args):
    global forgetting
    core, self._core, forgetting = self._core, Core(self._core), True
    try:
        return plain(self, *args)
    finally:
        self._core, forgetting = core, False

DaemonWarehouse._forget = forget
epoch_file.write = stepping(epoch_file.write)
ledger_file.LedgerFile.commit = stepping(ledger_file.LedgerFile.commit)
sys.exit(main(sys.argv[1:]))
"""


class Small(Serving):
    def command(self) -> list[str]:
        executable, _, _, _, *serve = super().command()
        return [executable, "-P", "-c", PROGRAM, *serve]


@contextmanager
def filled(disk: Path, **environment: str) -> Iterator[Small]:
    """KEPT has pages, GONE had pages and IDLE none; the last two are empty."""
    serving = Small(disk, **SIZES)
    serving.environment = environment
    with serving:
        with serving.connect(timeout_s=60) as client:
            client.open(GONE.space)
            for prompt in (KEPT, GONE):
                prompt.store_whole(client)
            assert client.flush(60).pending == 0
            assert client.clear(GONE.space) == GONE.pages
            client.open(IDLE.space)
        yield serving


def check_served(serving: Serving) -> None:
    with serving.connect(timeout_s=60) as client:
        assert KEPT.load(client) == KEPT.pages
        assert GONE.load(client) == 0
        for prompt in (NEXT, GONE):
            result = prompt.store(client)
            assert result.stored + result.already == prompt.pages
            assert prompt.load(client) == prompt.pages
        assert KEPT.load(client) == KEPT.pages
        assert client.clear(GONE.space) == GONE.pages


def known(serving: Serving, *directories: Path) -> tuple[int, set[tuple[str, int]]]:
    places = [str(path) for path in directories]
    log = Log("json", io.StringIO())
    who = identity.establish(places, log)
    ledger = Ledger(places, who.warehouse_id, log, expected=True, lazy=True)
    try:
        return ledger.floor, {(each.space.model, each.clear_epoch) for each in ledger.namespaces()}
    finally:
        ledger.close()


def names(client: kvw.Client) -> list[str]:
    return sorted(each.space.model for each in client.namespaces())


def test_daemon_that_dies_at_any_step_of_forgetting_brings_nothing_back(
    tmp_path: Path, rng: random.Random
) -> None:
    steps = range(STEPS + 1) if LONG else sorted(rng.sample(range(STEPS), 3))
    for step in steps:
        with filled(tmp_path / str(step), DIE_AT=str(step)) as serving:
            with serving.connect(timeout_s=60) as client:
                if step < STEPS:
                    with pytest.raises(kvw.TransportError):
                        client.open(NEXT.space)
                    serving.ended()
                else:
                    client.open(NEXT.space)
                    serving.kill()
            serving.environment = {}
            serving.start()
            check_served(serving)
            serving.kill()
            both = known(serving, serving.nvme_dir, serving.arena_dir)
            assert known(serving, serving.nvme_dir) == known(serving, serving.arena_dir) == both
            serving.start()
            check_served(serving)
        tally.count("daemon ended at a step of forgetting a namespace")


def test_namespace_beyond_the_bound_takes_the_place_of_the_empty_one_used_longest_ago(
    tmp_path: Path,
) -> None:
    with filled(tmp_path) as serving:
        with serving.connect(timeout_s=60) as client:
            NEXT.store_whole(client)
            assert names(client) == ["a", "c", "d"]
            told = eventually(lambda: serving.events("namespace_forgotten"), "the log says it")
            assert [event["namespace_id"] for event in told] == [GONE.space.id.hex()]
            IDLE.store_whole(client)
            with pytest.raises(kvw.CapacityError) as caught:
                client.open(GONE.space)
            assert caught.value.code == "too_many_namespaces"
            assert "clear" in caught.value.message
            client.clear(IDLE.space)
        for _ in range(2):
            check_served(serving)
            serving.kill()
            serving.start()


@pytest.mark.parametrize("remote", [False, True])
def test_client_of_a_forgotten_namespace_opens_it_again_and_sees_no_page_of_the_next(
    tmp_path: Path, remote: bool
) -> None:
    with filled(tmp_path) as serving, serving.connect(timeout_s=60) as client:
        connect = serving.connect_remote if remote else serving.connect
        with connect(timeout_s=60) as other:
            mine = other.open(GONE.space)
            strict = other.open(GONE.space, reopen=False)
            client.clear(GONE.space, forget=True)
            NEXT.store_whole(client)
            with pytest.raises(kvw.UsageError) as caught:
                strict.lookup(GONE.nodes)
            assert caught.value.code == "namespace_unknown"
            assert mine.lookup(GONE.nodes).pages == 0  # takes the place of the idle one
            assert names(client) == ["a", "b", "d"]
            assert GONE.store(other).stored == GONE.pages
            for prompt in (KEPT, GONE, NEXT):
                assert prompt.load(other) == prompt.pages


def test_cleared_namespaces_are_forgotten_where_they_are_asked_to_be(tmp_path: Path) -> None:
    with filled(tmp_path) as serving:
        with serving.connect(timeout_s=60) as client:
            assert client.clear(KEPT.space, forget=True) == KEPT.pages
            assert names(client) == ["b", "c"]
            KEPT.store_whole(client)
            watching = client.watch(KEPT.space)
            next(watching)
            with pytest.raises(kvw.CapacityError) as caught:
                client.clear(KEPT.space, forget=True)
            assert caught.value.code == "namespace_in_use"
            assert KEPT.load(client) == 0
            KEPT.store_whole(client)
            assert client.clear(all=True, forget=True) == KEPT.pages
            assert names(client) == ["a"]
            watching.close()
        serving.kill()
        serving.start()
        with serving.connect(timeout_s=60) as client:
            for prompt in (KEPT, GONE):
                assert prompt.load(client) == 0


def test_pages_of_a_forgotten_namespace_stay_away_when_a_detached_tier_or_no_ledger_is_there(
    tmp_path: Path,
) -> None:
    with filled(tmp_path) as serving:
        with serving.connect(timeout_s=60) as client:
            GONE.store_whole(client)
            assert client.flush(60).pending == 0
        nvme: dict[str, Any] = {
            name: serving.settings.pop(name) for name in list(serving.settings) if "nvme" in name
        }
        serving.stop()
        serving.start()
        with serving.connect(timeout_s=60) as client:
            assert client.clear(GONE.space, forget=True) == GONE.pages
            NEXT.store_whole(client)
        serving.stop()
        serving.settings.update(nvme)
        serving.start()
        check_served(serving)
        serving.stop()
        for folder in (serving.nvme_dir, serving.arena_dir):
            os.unlink(folder / ledger_file.FILE_NAME)
        serving.start()
        with serving.connect(timeout_s=60) as client:
            assert GONE.load(client) == 0
            assert NEXT.load(client) in (0, NEXT.pages)


def test_pages_of_a_namespace_that_a_lost_ledger_forgot_are_there_when_another_was_to_be_forgotten(
    tmp_path: Path,
) -> None:
    with filled(tmp_path) as serving:
        with serving.connect(timeout_s=60) as client:
            IDLE.store_whole(client)  # younger than the last clear
            assert client.flush(60).pending == 0
        serving.stop()
        for folder in (serving.nvme_dir, serving.arena_dir):
            os.unlink(folder / ledger_file.FILE_NAME)
        for _ in range(2):
            serving.start()
            with serving.connect(timeout_s=60) as client:
                client.open(NEXT.space)
                with pytest.raises(kvw.CapacityError) as caught:
                    client.clear(NEXT.space, forget=True)
                assert "1 namespaces that are missing" in caught.value.message
            serving.kill()
        serving.start()
        with serving.connect(timeout_s=60) as client:
            assert IDLE.load(client) == IDLE.pages
            client.clear(NEXT.space, forget=True)
            assert names(client) == ["c"]
            assert IDLE.load(client) == IDLE.pages
