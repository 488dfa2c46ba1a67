"""Copies of blocks on their way out: bounded, in order, and nobody waits for the warehouse."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.store_queue import StoreQueue
from kvwarehouse_connectors.vllm.settings import Settings, read_settings

PAGE = 1 << 18
SPACE = kvw.Namespace(
    model="m", weights="w", dtype="uint8", layout="t/1", page_tokens=1, page_bytes=PAGE
)


class Memory:
    """Blocks that are full of their own number."""

    block_bytes = PAGE
    copies_on_device = False
    fails = False

    def gather(self, blocks: Sequence[int], out: np.ndarray) -> None:
        if self.fails:
            raise RuntimeError("the blocks cannot be read")
        for row, block in zip(out, blocks, strict=True):
            row[:] = block

    def settle(self) -> None:
        pass


class Warehouse:
    """Stands in for the connection and what it opens: a contract model. Stores wait at a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.there = True
        self.error: Exception | None = None
        self.pages: list[tuple[bytes, int, bool]] = []
        self.shards: set[int] = set()
        self.failed_calls: list[BaseException] = []

    # -- as a DaemonConnection

    def namespace(self, space: kvw.Namespace) -> Any:
        return self if self.there else None

    wait_namespace = namespace

    def control(self) -> Any:
        return object() if self.there else None

    def call_failed(self, space: kvw.Namespace, error: BaseException) -> None:
        self.failed_calls.append(error)

    # -- as an OpenNamespace

    def store(
        self, *, keys: list[kvw.KeyRun], pages: np.ndarray, shard: int, timeout_s: float
    ) -> kvw.StoreResult:
        assert self.gate.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        self.shards.add(shard)
        names = [key for run in keys for key in run.keys]
        for name, row in zip(names, pages, strict=True):
            # Read only now: what was written over them since would show.
            self.pages.append((bytes(name), int(row[0]), bool((row == row[0]).all())))
        return kvw.StoreResult(len(names), 0, {})


def settings(staging: int = 8 * PAGE) -> Settings:
    extra = {"kvwarehouse.staging_bytes": staging, "kvwarehouse.store_timeout_s": DEADLINE_S}
    return read_settings(extra, "kv_both")


@pytest.fixture
def warehouse() -> Warehouse:
    return Warehouse()


Make = Callable[..., tuple[StoreQueue, list[kvw.StoreResult]]]


@pytest.fixture
def make(warehouse: Warehouse) -> Iterator[Make]:
    every: list[StoreQueue] = []

    def made(**options: Any) -> tuple[StoreQueue, list[kvw.StoreResult]]:
        results: list[kvw.StoreResult] = []
        store_queue = StoreQueue(
            warehouse,  # type: ignore[arg-type]
            settings(**options),
            3,
            lambda runs, result: results.append(result),
        )
        every.append(store_queue)
        return store_queue, results

    yield made
    warehouse.gate.set()
    for store_queue in every:
        store_queue.close()


def run(*blocks: int) -> PageRun:
    keys = [bytes([block]) * 32 for block in blocks]
    return PageRun(0, keys, list(blocks), False)


def names(warehouse: Warehouse) -> list[int]:
    return [name[0] for name, _, _ in warehouse.pages]


def test_blocks_of_a_step_are_stored_in_one_call_as_they_were(
    make: Make, warehouse: Warehouse
) -> None:
    store_queue, results = make()
    assert store_queue.put([run(1, 2), run(5)], SPACE, Memory())
    eventually(lambda: results, "it is stored")
    assert results == [kvw.StoreResult(3, 0, {})]
    assert warehouse.pages == [(bytes([block]) * 32, block, True) for block in (1, 2, 5)]
    assert warehouse.shards == {0}  # all ranks have this page alike: it has one shard
    eventually(lambda: store_queue._ring.used_bytes == 0, "its room is given back")


def test_blocks_that_each_rank_has_a_part_of_are_stored_as_its_shard(
    make: Make, warehouse: Warehouse
) -> None:
    store_queue, results = make()
    assert store_queue.put([run(1, 2)], dataclasses.replace(SPACE, shards=4), Memory())
    eventually(lambda: results, "it is stored")
    assert warehouse.shards == {3}


def test_full_outbox_leaves_out_the_newest_and_nobody_waits(
    make: Make, warehouse: Warehouse
) -> None:
    store_queue, results = make()
    warehouse.gate.clear()
    taken = [store_queue.put([run(block, block + 1)], SPACE, Memory()) for block in range(0, 12, 2)]
    assert taken == [True] * 4 + [False] * 2
    warehouse.gate.set()
    eventually(lambda: len(results) == 4, "the others are stored")
    assert names(warehouse) == list(range(8))
    assert store_queue.put([run(20)], SPACE, Memory())
    eventually(lambda: len(results) == 5, "there is room again")


def test_step_that_is_larger_than_the_outbox_is_left_out(make: Make) -> None:
    store_queue, results = make()
    assert not store_queue.put([run(*range(9))], SPACE, Memory())
    assert store_queue.put([run(*range(8))], SPACE, Memory())
    eventually(lambda: results, "it is stored")


def test_blocks_may_be_written_again_as_soon_as_they_are_put(
    make: Make, warehouse: Warehouse
) -> None:
    """Random sizes, a slow warehouse: what arrives is what each block was when it was put."""
    store_queue, _ = make()
    expected = []
    for number in range(100):
        blocks = [(number * 7 + place) % 251 for place in range(number % 4 + 1)]
        if store_queue.put([run(*blocks)], SPACE, Memory()):
            expected += blocks
    eventually(lambda: len(names(warehouse)) == len(expected), "all are stored")
    assert names(warehouse) == expected
    assert all(content == name[0] and whole for name, content, whole in warehouse.pages)


@pytest.mark.parametrize(
    "error", [kvw.TransportError("gone", code="no_daemon"), RuntimeError("odd")]
)
def test_store_that_fails_is_told_and_the_next_is_made(
    make: Make, warehouse: Warehouse, error: Exception
) -> None:
    store_queue, results = make()
    warehouse.error = error
    assert store_queue.put([run(1, 2)], SPACE, Memory())
    eventually(lambda: results, "the failure is told")
    assert results == [kvw.StoreResult(0, 0, {"unreachable": 2})]
    assert warehouse.failed_calls == [error]
    warehouse.error = None
    assert store_queue.put([run(3)], SPACE, Memory())
    eventually(lambda: len(results) == 2, "the next is stored")
    assert names(warehouse) == [3]
    eventually(lambda: store_queue._ring.used_bytes == 0, "all room is given back")


def test_what_comes_while_there_is_no_daemon_is_dropped_at_once(
    make: Make, warehouse: Warehouse
) -> None:
    store_queue, results = make()
    warehouse.there = False
    for block in range(50):
        eventually(
            lambda block=block: store_queue.put([run(block)], SPACE, Memory()), "there is room"
        )
    eventually(lambda: len(results) == 50, "all are told")
    assert {result.dropped_pages for result in results} == {1}
    assert warehouse.pages == []


def test_close_stores_what_is_queued_and_is_bounded(make: Make, warehouse: Warehouse) -> None:
    store_queue, results = make()
    for block in range(4):
        store_queue.put([run(block)], SPACE, Memory())
    store_queue.close()
    assert len(results) == 4
    assert not store_queue._thread.is_alive()


def test_step_whose_copy_fails_harms_no_other(make: Make, warehouse: Warehouse) -> None:
    """Room is given back in the order in which it was taken. If the failed step's stays taken, the
    next one's is given away while it is still being stored: pages of wrong bytes."""
    store_queue, results = make()
    warehouse.gate.clear()
    broken = Memory()
    broken.fails = True
    with pytest.raises(RuntimeError):
        store_queue.put([run(1, 2)], SPACE, broken)
    assert store_queue._ring.used_bytes == 0
    for block in (10, 20, 30, 40):
        assert store_queue.put([run(block, block + 1)], SPACE, Memory())
    warehouse.gate.set()
    eventually(lambda: len(results) == 4, "the others are stored")
    assert all(content == name[0] and whole for name, content, whole in warehouse.pages)


def test_storing_makes_way_for_the_engines_threads(make: Make) -> None:
    """On a CPU they compute on every core."""
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    store_queue, _ = make()
    thread = store_queue._thread.native_id or 0
    nicer = min(own + 10, 19)
    eventually(lambda: os.getpriority(os.PRIO_PROCESS, thread) == nicer, "a nicer thread")
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own, "and it alone"
