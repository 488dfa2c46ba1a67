"""Clients at full speed, as processes of their own: writers that store prompts one after another,
readers that look up and load what writers have finished. Run as

    python -m testkit.traffic JSON

with the fields of Task. Told to go on and to stop, and watched, through a Board. What a client
found is written as JSON to Task.report at its end; what must never happen ends it with a traceback
there.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse.client.connect import connect_grpc
from kvwarehouse.client.transport import shared_memory_of
from kvwarehouse_bench.harness.pages import check_pages, pages_of

_WORDS = 2
_MOST_WORKERS = 8
_PAUSE_S = 0.002
_SHARED = 255  # in place of a writer's number: prompts that several writers store


class Board:
    """Words in a file that every process maps: stop, quota, for each writer the prompts it has
    finished, for each worker whether it is connected, and for each reader the pages it has loaded.
    Single words, each with one writer."""

    def __init__(self, path: Path) -> None:
        size = _WORDS + 3 * _MOST_WORKERS
        if not path.exists():
            path.write_bytes(bytes(8 * size))
        self._words: NDArray[np.int64] = np.memmap(path, np.int64, "r+", shape=(size,))

    @property
    def stopped(self) -> bool:
        return bool(self._words[0])

    def stop(self) -> None:
        self._words[0] = 1

    @property
    def quota(self) -> int:
        """Prompts that each writer may have stored by now."""
        return int(self._words[1])

    @quota.setter
    def quota(self, prompts: int) -> None:
        self._words[1] = prompts

    def finished(self, writer: int) -> int:
        return int(self._words[_WORDS + writer])

    def finish(self, writer: int, prompts: int) -> None:
        self._words[_WORDS + writer] = prompts

    def finished_by_all(self) -> int:
        return int(self._words[_WORDS : _WORDS + _MOST_WORKERS].sum())

    def arrive(self, worker: int) -> None:
        self._words[_WORDS + _MOST_WORKERS + worker] = 1

    def arrived(self) -> int:
        """Workers that are connected."""
        return int(self._words[_WORDS + _MOST_WORKERS : _WORDS + 2 * _MOST_WORKERS].sum())

    def load(self, reader: int, pages: int) -> None:
        self._words[_WORDS + 2 * _MOST_WORKERS + reader] = pages

    def loaded(self, reader: int) -> int:
        return int(self._words[_WORDS + 2 * _MOST_WORKERS + reader])


@dataclass
class Task:
    role: str  # "write", "read"
    number: int
    address: str
    board: str
    report: str
    seed: int
    writers: int
    prompt_pages: int
    page_tokens: int = 4
    page_bytes: int = 4096
    complete: bool = True  # nothing is ever evicted: what was stored is there, all of it
    remote: bool = False
    timeout_s: float = 10.0

    def space(self) -> kvw.Namespace:
        return kvw.Namespace(
            model="traffic",
            weights="w",
            dtype="uint8",
            layout="t/1",
            page_tokens=self.page_tokens,
            page_bytes=self.page_bytes,
        )

    def nodes(self, writer: int, number: int) -> list[int]:
        """Every other prompt of a writer is one that all writers store."""
        whose = _SHARED if number % 2 else writer
        return [whose << 24 | number << 10 | place for place in range(self.prompt_pages)]

    def tokens(self, nodes: list[int]) -> NDArray[np.uint32]:
        starts = np.asarray(nodes, np.uint64)[:, None] * self.page_tokens % 2**32
        return (starts + np.arange(self.page_tokens, dtype=np.uint64)).astype(np.uint32).ravel()


@dataclass
class Report:
    stored: int = 0
    already: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    loaded: int = 0
    short: int = 0  # loads that were not whole, with the newest index
    shortest: str = ""  # the last of them
    missed: dict[str, int] = field(default_factory=dict)
    outages: int = 0  # calls that said there is no daemon
    longest_s: float = 0.0
    failure: str = ""


class Worker:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.board = Board(Path(task.board))
        self.report = Report()
        self.rng = random.Random(f"{task.seed}:{task.role}:{task.number}")
        connect = connect_grpc if task.remote else kvw.connect
        self.client = connect(task.address, timeout_s=task.timeout_s)
        self.opened = self.client.open(task.space())
        self.board.arrive(task.number)
        self.never = threading.Event()

    def run(self) -> None:
        if self.task.role == "write":
            self.write()
        else:
            while not self.board.stopped:
                self.read()

    # --- writers

    def write(self) -> None:
        number = 0
        while not self.board.stopped:
            if number >= self.board.quota:
                self.never.wait(_PAUSE_S)
            elif self.store(number):
                number += 1
                self.board.finish(self.task.number, number)

    def store(self, number: int) -> bool:
        """Whether all of the prompt is known to be stored; else it is to be tried again."""
        task, report = self.task, self.report
        nodes = task.nodes(task.number, number)
        try:
            result = self.timed(
                lambda: self.opened.store(
                    task.tokens(nodes), pages_of(nodes, 0, 0, task.page_bytes), timeout_s=5
                )
            )
        except kvw.TransportError:
            report.outages += 1
            self.never.wait(_PAUSE_S)
            return False
        report.stored += result.stored
        report.already += result.already
        for reason, pages in result.dropped.items():
            report.dropped[reason] = report.dropped.get(reason, 0) + pages
        return not result.dropped or not task.complete

    # --- readers

    def read(self) -> None:
        task, report = self.task, self.report
        writer = self.rng.randrange(task.writers)
        finished = self.board.finished(writer)
        if not finished:
            self.never.wait(_PAUSE_S)
            return
        nodes = task.nodes(writer, self.rng.randrange(max(0, finished - 200), finished))
        tokens = task.tokens(nodes)
        out = np.zeros((len(nodes), task.page_bytes), np.uint8)
        before = self.index()
        try:
            found = self.timed(lambda: self.opened.lookup(tokens)).pages
            loaded = self.timed(lambda: self.opened.load(tokens, out, timeout_s=5))
        except kvw.TransportError:
            report.outages += 1
            self.never.wait(_PAUSE_S)
            return
        check_pages(out[:loaded], nodes[:loaded], 0, 0)
        report.loaded += loaded
        self.board.load(task.number, report.loaded)
        if min(found, loaded) < len(nodes) and before == self.index() != "old":
            report.short += 1
            report.shortest = f"looked up {found}, loaded {loaded!r} of {len(nodes)} pages"
        for reason, pages in loaded.missed.items():
            report.missed[reason] = report.missed.get(reason, 0) + pages

    def index(self) -> str:
        """Which daemon's index lookups read. A local client goes on with the old one until it is
        with the next daemon; what is stored meanwhile is not in it."""
        if self.task.remote:
            return "the daemon's own"
        native = shared_memory_of(self.client).native
        mine, newest = native.incarnation, native.control()["incarnation"]
        return "old" if mine != newest else str(mine)

    def timed(self, call: Any) -> Any:
        begin = time.monotonic()
        try:
            return call()
        finally:
            self.report.longest_s = max(self.report.longest_s, time.monotonic() - begin)


def start(task: Task) -> subprocess.Popen[bytes]:
    """The worker's process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVW_")}
    command = [sys.executable, "-P", "-m", "testkit.traffic", json.dumps(asdict(task))]
    return subprocess.Popen(command, env=environment)


def read_report(task: Task) -> Report:
    return Report(**json.loads(Path(task.report).read_text(encoding="utf-8")))


def main(argument: str) -> int:
    task = Task(**json.loads(argument))
    report = Report()
    try:
        worker = Worker(task)
        report = worker.report
        worker.run()
    except BaseException:  # noqa: BLE001  the process's edge; the test reads it
        report.failure = traceback.format_exc()
    Path(task.report).write_text(json.dumps(asdict(report)), encoding="utf-8")
    return 1 if report.failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
