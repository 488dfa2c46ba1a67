"""Large loads by two threads: every block is right, and none is written after the report."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.vllm import loads as module
from kvwarehouse_connectors.vllm.loads import LoadOptions, Loads
from kvwarehouse_connectors.vllm.messages import LoadOrder
from kvwarehouse_connectors.vllm.results import Results

PAGE = 4096
PAGES = 33
SPACE = kvw.Namespace(
    model="loads", weights="w", page_tokens=16, page_bytes=PAGE, dtype="bf16", layout="rows"
)


@dataclass
class Rows:
    """A cache whose blocks are rows; loads can be watched and held up."""

    cache: np.ndarray[Any, np.dtype[np.uint8]]
    block_bytes: int = PAGE
    takes_loads_at_once: bool = True
    threads: set[int] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    held: str = ""
    """Which half waits at the gate: "first", "second" or none; that half then raises."""

    def load(
        self, space: kvw.OpenNamespace, run: PageRun, begin: int, shard: int, timeout_s: float
    ) -> kvw.Loaded:
        self.threads.add(threading.get_ident())
        if self.held == ("second" if run.position else "first"):
            assert self.gate.wait(DEADLINE_S)
            raise kvw.TransportError("held up", code="test")
        out = np.empty((len(run.blocks) - begin, PAGE), np.uint8)
        loaded = space.load(keys=run.key_runs(begin), out=out, shard=shard, timeout_s=timeout_s)
        self.cache[list(run.blocks[begin : begin + int(loaded)])] = out[: int(loaded)]
        return loaded

    def scatter(self, blocks: Any, rows: Any) -> None:
        self.cache[list(blocks)] = rows

    def after_engine(self) -> None:
        return None

    def engine_done(self, timeout_s: float) -> float | None:
        return 0.0


class AnyWay:
    def round_trip(self, memory: Any, blocks: Any) -> bool:
        return True


@pytest.fixture(scope="module")
def daemon() -> Iterator[kvw.PrivateDaemon]:
    with kvw.PrivateDaemon({"dram": "64MiB"}) as daemon:
        yield daemon


@dataclass
class World:
    memory: Rows
    loads: Loads
    results: Results
    order: LoadOrder
    pages: Any
    client: kvw.Client

    def run(self) -> tuple[set[str], set[int]]:
        """Requests that were reported, and blocks that did not come."""
        self.loads.begin(self.order, (SPACE,))
        received: set[str] = set()

        def ended() -> bool:
            received.update(self.results.take_requests()[0])
            return bool(received)

        eventually(ended, "a report")
        return received, self.results.take_bad_blocks()


@pytest.fixture
def world(
    daemon: kvw.PrivateDaemon, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setattr(module, "_HALVED_BYTES", 2 * PAGE)
    keys = [rng.randbytes(32) for _ in range(PAGES)]
    pages = np.frombuffer(rng.randbytes(PAGES * PAGE), np.uint8).reshape(PAGES, PAGE)
    connection = DaemonConnection(daemon.address, ConnectionOptions(tick_s=0.01))
    with kvw.connect(daemon.address) as client:
        client.open(SPACE).store(keys=keys, pages=pages)
        memory, results = Rows(np.zeros((2 * PAGES, PAGE), np.uint8)), Results()
        self_test: Any = AnyWay()
        memories: Any = [memory]
        loads = Loads(connection, self_test, memories, results, LoadOptions(False, 0, DEADLINE_S))
        blocks = rng.sample(range(2 * PAGES), PAGES)
        order = LoadOrder("r", (PageRun(0, keys, blocks, True),))
        yield World(memory, loads, results, order, pages, client)
        memory.gate.set()
        loads.close()
    connection.close()


def test_a_large_load_is_made_by_two_threads_and_every_block_is_right(world: World) -> None:
    assert world.run() == ({"r"}, set())
    assert len(world.memory.threads) == 2
    assert np.array_equal(world.memory.cache[list(world.order.runs[0].blocks)], world.pages)


def test_a_small_load_is_made_by_one_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HALVED_BYTES", PAGES * PAGE + 1)
    assert world.run() == ({"r"}, set())
    assert len(world.memory.threads) == 1


@pytest.mark.parametrize("lost", [0, 5, PAGES // 2 - 1, PAGES // 2, PAGES - 1])
def test_blocks_from_the_first_that_is_not_there_are_bad_whichever_half_has_it(
    world: World, lost: int
) -> None:
    """Those after it came, but are of no use, and must not be believed to be there."""
    run = world.order.runs[0]
    keys = list(run.keys)
    keys[lost] = b"not stored".ljust(32)
    world.order = LoadOrder("r", (PageRun(0, keys, run.blocks, True),))
    received, bad = world.run()
    assert received == {"r"}
    assert bad == set(run.blocks[lost:])
    assert not world.memory.cache[list(run.blocks[lost:])].any(), "bad blocks hold zeros"
    assert np.array_equal(world.memory.cache[list(run.blocks[:lost])], world.pages[:lost])


@pytest.mark.parametrize("held", ["first", "second"])
def test_a_load_is_not_reported_while_a_half_of_it_still_writes(world: World, held: str) -> None:
    """The engine would give the blocks to somebody else."""
    world.memory.held = held
    world.loads.begin(world.order, (SPACE,))
    eventually(lambda: len(world.memory.threads) == 2, "both halves under way")
    assert world.results.take_requests() == (set(), set())
    world.memory.gate.set()
    eventually(lambda: world.results.take_requests()[0] == {"r"}, "a report")
    assert world.results.take_bad_blocks() == set(world.order.runs[0].blocks)
