"""kill -9 of the daemon in the middle of stores and loads, again and again.

Every page that a store reported is afterwards there; no byte is ever wrong; clients find the next
daemon by themselves, and until then every call ends within its time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.pages import check_pages
from kvwarehouse_bench.harness.serving import Serving
from testkit import tally, traffic

LONG = tally.rounds(1) > 1  # `make faults`
pytestmark = pytest.mark.timeout(1500 if LONG else 300)

CLASS = "daemon killed (SIGKILL) under traffic"
WAIT_S = 60.0
HANGS_S = 45.0  # far beyond every call's own time, even on a machine with much else to do


class Traffic:
    """Two writers, a local reader and a remote one."""

    def __init__(self, serving: Serving, folder: Path, seed: int, **shape: Any) -> None:
        self.serving = serving
        self.board = traffic.Board(folder / "board")
        self.tasks = [
            traffic.Task(
                role=role,
                number=number,
                address=serving.address,
                board=str(folder / "board"),
                report=str(folder / f"{role}-{number}"),
                seed=seed,
                writers=2,
                remote=remote,
                **shape,
            )
            for role, number, remote in [
                ("write", 0, False), ("write", 1, False), ("read", 2, False), ("read", 3, True),
            ]
        ]  # fmt: skip
        self.processes = [traffic.start(task) for task in self.tasks]
        eventually(
            lambda: self.board.arrived() == len(self.tasks) or self.ended(), "all have connected"
        )

    def advance(self, prompts: int) -> None:
        """Waits until the writers together have stored `prompts` more."""
        goal = self.board.finished_by_all() + prompts

        def moved() -> bool:
            assert not self.ended(), self.failures()
            return self.board.finished_by_all() >= goal

        eventually(moved, f"{prompts} more prompts are stored")

    def read(self) -> None:
        """Waits until every reader has loaded more."""
        readers = [task.number for task in self.tasks if task.role == "read"]
        before = {reader: self.board.loaded(reader) for reader in readers}

        def moved() -> bool:
            assert not self.ended(), self.failures()
            return all(self.board.loaded(reader) > before[reader] for reader in readers)

        eventually(moved, "every reader has loaded more")

    def ended(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def end(self) -> list[traffic.Report]:
        self.board.stop()
        for process in self.processes:
            process.wait(WAIT_S)
        assert not self.failures(), self.failures()
        return [traffic.read_report(task) for task in self.tasks]

    def failures(self) -> str:
        written = [task for task in self.tasks if Path(task.report).exists()]
        return "\n".join(traffic.read_report(task).failure for task in written).strip()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(WAIT_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def rounds(moving: Traffic, rng: random.Random, kills: int, prompts: int) -> Iterator[int]:
    """Kills the daemon `kills` times, each at a random point of `prompts` prompts a writer."""
    for kill in range(kills):
        moving.board.quota += prompts
        moving.advance(rng.randint(1, prompts))
        moving.serving.kill()
        yield kill
        moving.serving.start()
    moving.board.quota += prompts
    moving.advance(1)  # they have found the last daemon too
    moving.read()


def check_sane(reports: list[traffic.Report]) -> None:
    for report in reports:
        assert report.longest_s < HANGS_S
        assert "mismatch" not in report.missed
    assert all(report.outages for report in reports[:2]), "no writer met an outage"
    assert all(report.loaded for report in reports[2:]), "a reader loaded nothing"


def test_every_page_reported_stored_is_there_after_kills_in_the_middle(
    folder: Path, rng: random.Random, seed: int
) -> None:
    """With room for all of it, so that nothing may be missing."""
    kills, prompts_each = (80, 5) if LONG else (4, 30)
    with Serving(folder, dram="192MiB", index_pages=1 << 17, grace_s="0.2") as serving:
        moving = Traffic(serving, folder, seed, prompt_pages=24, complete=True)
        try:
            for _ in rounds(moving, rng, kills=kills, prompts=prompts_each):
                pass
            eventually(
                lambda: moving.board.finished_by_all() >= 2 * moving.board.quota,
                "the writers have stored their prompts",
            )
            reports = moving.end()
        finally:
            moving.kill()
        check_sane(reports)
        prompts = moving.board.quota
        task = moving.tasks[0]
        distinct = {
            node for writer in (0, 1) for n in range(prompts) for node in task.nodes(writer, n)
        }
        # A page that had been lost would have been stored, and reported, a second time.
        assert sum(report.stored for report in reports) <= len(distinct)
        assert [(report.short, report.shortest) for report in reports[2:]] == [(0, "")] * 2
        check_all_there(serving, task, prompts)
        serving.kill()
        serving.start()
        check_all_there(serving, task, prompts)
        tally.count(CLASS, kills + 1)


def check_all_there(serving: Serving, task: traffic.Task, prompts: int) -> None:
    """Every page of both writers, and nothing besides."""
    there = set()
    with serving.connect() as client:
        opened = client.open(task.space())
        for writer in (0, 1):
            for number in range(prompts):
                nodes = task.nodes(writer, number)
                out = np.zeros((len(nodes), task.page_bytes), np.uint8)
                assert opened.load(task.tokens(nodes), out) == len(nodes)
                check_pages(out, nodes, 0, 0)
                there.update(nodes)
        core = client.status()["core"]
        assert not any(core["tiers"]["dram"]["left"].values())
        assert core["tiers"]["dram"]["pages"] == len(there)

        def settled() -> bool:
            dram = client.status()["core"]["tiers"]["dram"]
            return dram["reserved_slots"] == dram["limbo_slots"] == 0

        eventually(settled, "what killed daemons and ended clients had reserved is free again")


def test_no_byte_is_wrong_after_kills_in_the_middle_of_evictions_and_reclaim(
    folder: Path, rng: random.Random, seed: int
) -> None:
    kills, prompts = (120, 30) if LONG else (3, 60)
    sizes = {"dram": "16MiB", "nvme_capacity": "32MiB", "nvme_segment": "2MiB", "grace_s": "0.2"}
    with Serving(folder, **sizes) as serving:
        moving = Traffic(serving, folder, seed, prompt_pages=16, page_bytes=16384, complete=False)
        try:
            for _ in rounds(moving, rng, kills=kills, prompts=prompts):
                pass
            reports = moving.end()
        finally:
            moving.kill()
        check_sane(reports)
        with serving.connect() as client:
            core = client.status()["core"]
        assert core["quarantined"] == core["tiers"]["nvme"]["mismatches"] == 0
        assert core["loads"]["failed"].get("mismatch", 0) == 0
        serving.kill()
        serving.start()
        with serving.connect() as client:
            checked = list(client.check(moving.tasks[0].space()))
            assert checked[-1].done
            assert not any(progress.bad for progress in checked)
        tally.count(CLASS, kills + 1)
