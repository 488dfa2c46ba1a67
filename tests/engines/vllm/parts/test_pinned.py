"""vLLM's caches on a GPU, straight to and from the arena: every layout, over a real daemon and the
contract model of CUDA's driver (not a GPU), and what loads report of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.core.device_copies import DeviceCopies
from kvwarehouse_connectors.core.memory import RowsOnly
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.pinned_memory import PinnedMemory
from kvwarehouse_connectors.core.store_queue import StoreQueue
from kvwarehouse_connectors.vllm.cache_layout import block_layout
from kvwarehouse_connectors.vllm.loads import LoadOptions, Loads
from kvwarehouse_connectors.vllm.messages import LoadOrder
from kvwarehouse_connectors.vllm.results import Results
from testkit.cuda_model import ModelDevice
from testkit.cuda_tensors import ModelMemory, ModelStream, ModelTensor
from vllm_parts.tensors import Caches, caches, laid_out, shapes, storage

pytestmark = pytest.mark.usefixtures("contract_kept")

BLOCKS = 7
TIMEOUT_S = 60.0


class Moved:
    """A cache of vLLM's, moved to the model's device: the same shapes and strides there."""

    def __init__(self, device: ModelDevice, cache: Caches) -> None:
        self.cache = cache
        self.memories: dict[int, tuple[torch.Tensor, ModelMemory]] = {}
        self.by_layer = {name: self._moved(device, t) for name, t in cache.by_layer.items()}

    def _moved(self, device: ModelDevice, tensor: torch.Tensor) -> ModelTensor:
        at = tensor.untyped_storage().data_ptr()
        if at not in self.memories:
            memory = ModelMemory(device, storage(tensor).size)
            memory.fill(storage(tensor))
            self.memories[at] = tensor, memory
        return ModelTensor(
            self.memories[at][1],
            tensor.shape,
            tensor.stride(),
            tensor.element_size(),
            tensor.dtype,
            tensor.storage_offset(),
        )

    def memory(self, group: int, host: Any, copies: DeviceCopies, stream: Any) -> PinnedMemory:
        names = self.cache.config.kv_cache_groups[group].layer_names
        layout = block_layout(self.by_layer, names, self.cache.blocks, self.cache.order)
        return PinnedMemory(layout, host, copies, stream)

    def same(self) -> bool:
        """Whether every byte there is as in the cache that stayed."""
        return all(
            np.array_equal(memory.data, storage(tensor))
            for tensor, memory in self.memories.values()
        )


@dataclass
class Host(RowsOnly):
    """Stands in for the way through a buffer: a contract model, which only counts."""

    scattered: list[int] = field(default_factory=list)
    block_bytes: int = 0
    takes_loads_at_once: bool = False

    def gather(self, blocks: Any, out: Any) -> None:
        raise AssertionError("not this way")

    def settle(self) -> None:
        pass

    def after_engine(self) -> None:
        pass

    def scatter(self, blocks: Any, rows: Any) -> None:
        self.scattered += blocks

    def load(self, *_: Any) -> kvw.Loaded:
        raise AssertionError("not this way")


@pytest.fixture(scope="module")
def connection(
    cuda_driver: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonConnection]:
    with Serving(tmp_path_factory.mktemp("disk"), dram="64MiB") as serving:
        connection = DaemonConnection(serving.address, ConnectionOptions(tick_s=0.01))
        yield connection
        connection.close()


def space_of(page_bytes: int) -> kvw.Namespace:
    return kvw.Namespace(
        model="pinned",
        weights="w",
        dtype="any",
        layout="v/1",
        page_tokens=16,
        page_bytes=page_bytes,
    )


def nothing() -> None:
    return None


@pytest.mark.parametrize(
    ("shape", "layout"),
    [pytest.param(shape, layout, id=f"{shape}-{layout.name}") for shape, layout in laid_out()],
)
def test_blocks_of_every_layout_go_out_and_come_back_byte_for_byte(
    shape: str,
    layout: KVCacheLayout,
    device: ModelDevice,
    connection: DaemonConnection,
    rng: random.Random,
) -> None:
    torch.manual_seed(1)
    cache = caches(shapes()[shape], layout, BLOCKS)
    moved = Moved(device, cache)
    copies, stream, results = DeviceCopies(0, nothing), ModelStream(device), []
    store_queue = StoreQueue(
        connection,
        SimpleNamespace(staging_bytes=8 << 20, store_timeout_s=TIMEOUT_S),
        0,
        lambda runs, result: results.append(result),
    )
    try:
        for group in range(len(cache.config.kv_cache_groups)):
            memory = moved.memory(group, Host(), copies, stream)
            assert memory.block_bytes == cache.host(group).block_bytes
            run = PageRun(group, [rng.randbytes(32) for _ in range(3)], [5, 0, 3], True)
            pages = np.stack([cache.page(block, group) for block in run.blocks])
            space = space_of(memory.block_bytes)
            assert store_queue.put([run], space, memory)
            eventually(lambda group=group: len(results) == group + 1, "it is stored")
            assert results[-1] == kvw.StoreResult(3, 0, {})
            opened = connection.wait_namespace(space, TIMEOUT_S)
            assert opened is not None
            rows = np.zeros_like(pages)
            assert opened.load(keys=run.key_runs(), out=rows) == 3
            assert np.array_equal(rows, pages), "in the order of memory, as from the host"
            back = PageRun(group, run.keys, [2, 6, 1], True)
            memory.after_engine()
            assert memory.load(opened, back, 0, 0, TIMEOUT_S) == 3
            cache.host(group).scatter(back.blocks, pages)
            assert moved.same(), "those blocks, and nothing else"
    finally:
        store_queue.close()
    assert copies.usable


# --- what loads report


class World:
    """One group's cache, blocks of it in the warehouse, and loads of them."""

    def __init__(
        self, device: ModelDevice, connection: DaemonConnection, rng: random.Random
    ) -> None:
        torch.manual_seed(1)
        self.cache = caches(shapes()["three layers"], KVCacheLayout.LBHNC, BLOCKS)
        self.moved = Moved(device, self.cache)
        self.host = Host()
        self.memory = self.moved.memory(0, self.host, DeviceCopies(0, nothing), ModelStream(device))
        self.space = space_of(self.memory.block_bytes)
        keys = [rng.randbytes(32) for _ in range(3)]
        self.run = PageRun(0, keys, [4, 1, 6], True)
        self.pages = np.stack([self.cache.page(block) for block in (0, 2, 3)])
        opened = connection.wait_namespace(self.space, TIMEOUT_S)
        assert opened is not None
        assert opened.store(keys=self.run.key_runs(), pages=self.pages).stored == 3
        self.results = Results()
        self.received: set[str] = set()
        self_test: Any = SimpleNamespace(round_trip=lambda memory, blocks: True)
        self.loads = Loads(
            connection, self_test, [self.memory], self.results, LoadOptions(False, 0, TIMEOUT_S)
        )

    def begin(self, page_compute_s: float = 0.0) -> None:
        order = LoadOrder("r", (self.run,), page_compute_s=page_compute_s)
        self.loads.begin(order, (self.space,))

    def reported(self) -> bool:
        self.received |= self.results.take_requests()[0]
        return bool(self.received)

    def ended(self) -> set[int]:
        """Waits for the report; the blocks that did not come."""
        eventually(self.reported, "a report")
        return self.results.take_bad_blocks()


@pytest.fixture
def world(device: ModelDevice, connection: DaemonConnection, rng: random.Random) -> Iterator[World]:
    world = World(device, connection, rng)
    yield world
    device.set("hold", 0)
    world.loads.close()


def test_load_is_not_reported_before_its_copies_are_done(world: World, device: ModelDevice) -> None:
    copies = device.count("copies")
    ready = threading.Event()
    real = world.memory.engine_done

    def engine_done(timeout_s: float) -> float | None:
        answer = real(timeout_s)
        device.set("hold", 1)  # from here on nothing is done that the load queues
        ready.set()
        return answer

    world.memory.engine_done = engine_done  # type: ignore[method-assign]
    world.begin()
    assert ready.wait(TIMEOUT_S)
    eventually(lambda: device.count("copies") > copies, "copies are queued")
    assert not world.reported()
    device.set("hold", 0)
    assert world.ended() == set()
    world.cache.host(0).scatter(world.run.blocks, world.pages)
    assert world.moved.same()


def test_load_comes_after_a_step_that_still_uses_its_blocks(
    world: World, device: ModelDevice
) -> None:
    tensor, memory = next(iter(world.moved.memories.values()))
    memory.queue_fill(np.full(memory.size_bytes, 7, np.uint8))
    world.begin()
    assert world.ended() == set()
    done = ModelStream(device).recorded()
    eventually(done.query, "the step is over")
    storage(tensor)[:] = 7
    world.cache.host(0).scatter(world.run.blocks, world.pages)
    assert world.moved.same()


def test_waiting_for_the_engine_is_no_part_of_a_loads_schedule(world: World) -> None:
    """A long step of others would make every load late."""
    given: list[float] = []
    real = world.memory.load

    def load(space: Any, run: Any, begin: int, shard: int, timeout_s: float) -> kvw.Loaded:
        given.append(timeout_s)
        return real(space, run, begin, shard, timeout_s)

    world.memory.engine_done = lambda timeout_s: 1000.0  # type: ignore[method-assign]
    world.memory.load = load  # type: ignore[method-assign]
    world.begin(page_compute_s=1.0)  # the first page is due 0.09 s after the load begins
    assert world.ended() == set()
    assert given[0] > 60


def test_engine_that_does_not_come_to_the_blocks_is_a_miss(world: World) -> None:
    world.memory.engine_done = lambda timeout_s: None  # type: ignore[method-assign]
    world.begin()
    assert world.ended() == set(world.run.blocks)
    assert world.host.scattered == list(world.run.blocks), "blocks that did not come hold zeros"


def test_blocks_that_a_hanging_device_may_still_write_to_are_never_given_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Reported, they would be another request's when the copies come."""

    def load(*_: Any) -> kvw.Loaded:
        raise kvw.StorageError("device 0 has not finished", code="gpu_stalled")

    world.memory.load = load  # type: ignore[method-assign]
    world.begin()
    world.loads.close()
    assert not world.reported()
    assert world.results.take_bad_blocks() == set()
    assert world.host.scattered == []
    assert "waits for ever" in caplog.text
