"""Blocks of an engine's paged cache on a GPU, straight to and from the arena: the connectors' part
that needs no engine, over a real daemon and the contract model of CUDA's driver. It needs no GPU:
tests/gpu has the same on torch's tensors.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.client.gpu import kernels
from kvwarehouse.testing.cuda_model import ModelDevice
from kvwarehouse.testing.cuda_tensors import ModelMemory, ModelStream, ModelTensor, contiguous
from kvwarehouse.testing.damage import find_one
from kvwarehouse.testing.serving import Serving
from kvwarehouse.testing.until import until
from kvwarehouse_connectors.common.device_copies import DeviceCopies, device_copies, may_still_write
from kvwarehouse_connectors.common.layout import BlockLayout, pieces_of
from kvwarehouse_connectors.common.memory import RowsOnly
from kvwarehouse_connectors.common.outbox import Outbox
from kvwarehouse_connectors.common.page_run import PageRun
from kvwarehouse_connectors.common.pinned_memory import PinnedMemory
from kvwarehouse_connectors.common.proof import Proof
from kvwarehouse_connectors.common.upkeep import Upkeep, UpkeepOptions

pytestmark = pytest.mark.usefixtures("contract_kept")

BLOCKS = 9
LAYERS = 3
STAGING_BYTES = 8 << 20
TIMEOUT_S = 60.0
ITEM_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}

# By name: a view's shape, and the order of its dimensions in memory, outermost first.
# B: blocks, N: tokens, H: heads, C: keys beside values, D: the size of a head.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    # [B, N, H, C*D] in this order: tokens outside
    "NHD": ((BLOCKS, 16, 4, 40), (0, 1, 2, 3)),
    # the same view, heads outside
    "HND": ((BLOCKS, 16, 4, 40), (0, 2, 1, 3)),
    # keys and values apart, outside of the blocks: two pieces a block
    "keys then values": ((BLOCKS, 2, 16, 4, 24), (1, 0, 2, 3, 4)),
    # heads outside of the blocks: a piece a head
    "heads outside": ((BLOCKS, 4, 16, 40), (1, 0, 2, 3)),
    # one latent a token, of no round size
    "MLA": ((BLOCKS, 16, 1, 57), (0, 1, 2, 3)),
    # one tensor of all layers: blocks outside, a layer's part of a block inside
    "cross-layer": ((BLOCKS, 16, 4, 40), (0, 1, 2, 3)),
    # pieces of 128 KiB and more go by the copy engines, each for itself
    "large": ((BLOCKS, 16, 8, 1024), (0, 1, 2, 3)),
}


@dataclass
class Cache:
    """Layers on the model's device. `pages`: what each block holds, layer by layer in the order of
    memory, read off by the shapes and not by the connector's code."""

    memories: list[ModelMemory]
    views: list[ModelTensor]
    order: tuple[int, ...]
    layout: BlockLayout

    def pages(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        parts = []
        if len(self.memories) < len(self.views):
            return self.memories[0].data.reshape(BLOCKS, -1)
        for memory, view in zip(self.memories, self.views, strict=True):
            shape = [view.shape[d] for d in self.order]
            whole = memory.data.reshape(*shape, view.element_size())
            whole = np.moveaxis(whole, self.order.index(0), 0)
            parts.append(whole.reshape(BLOCKS, -1))
        return np.concatenate(parts, axis=1)


def cache_of(device: ModelDevice, name: str, dtype: str, rng: random.Random) -> Cache:
    shape, order = LAYOUTS[name]
    item = ITEM_BYTES[dtype]
    if name == "cross-layer":
        whole = (BLOCKS, LAYERS, *shape[1:])
        memory = ModelMemory(device, int(np.prod(whole)) * item)
        memory.fill(np.frombuffer(rng.randbytes(memory.size_bytes), np.uint8))
        strides, inside = contiguous(whole), int(np.prod(shape[1:]))
        views = [
            ModelTensor(memory, shape, (strides[0], *strides[2:]), item, dtype, layer * inside)
            for layer in range(LAYERS)
        ]
        return Cache([memory], views, order, layout_of(views))
    places, step = [0] * len(shape), 1
    for dimension in reversed(order):
        places[dimension] = step
        step *= shape[dimension]
    memories = [ModelMemory(device, step * item) for _ in range(LAYERS)]
    for memory in memories:
        memory.fill(np.frombuffer(rng.randbytes(memory.size_bytes), np.uint8))
    views = [ModelTensor(memory, shape, places, item, dtype) for memory in memories]
    return Cache(memories, views, order, layout_of(views))


def layout_of(views: list[ModelTensor]) -> BlockLayout:
    pieces = [piece for view in views for piece in pieces_of(view)[0]]
    bases, strides, sizes = zip(*pieces, strict=True)
    return BlockLayout(
        tuple(views),
        np.array(bases, np.uint64),
        np.array(strides, np.int64),
        np.array(sizes, np.uint64),
        "test",
    )


class Buffer(RowsOnly):
    """Stands in for DeviceMemory, whose operations the model's tensors do not have."""

    takes_loads_at_once = False

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.block_bytes = cache.layout.block_bytes
        self.gathers = self.loads = 0

    def gather(self, blocks: Any, out: Any) -> None:
        self.gathers += 1
        out[:] = self._cache.pages()[list(blocks)]

    def settle(self) -> None:
        pass

    def after_engine(self) -> None:
        pass

    def scatter(self, blocks: Any, rows: Any) -> None:
        device, layout = self._cache.memories[0].device, self._cache.layout
        for block, row in zip(blocks, rows, strict=True):
            at = 0
            for base, stride, size in zip(
                layout.bases, layout.strides, layout.piece_bytes, strict=True
            ):
                device.poke(int(base) + block * int(stride), row[at : at + int(size)])
                at += int(size)

    def load(
        self, space: kvw.OpenNamespace, run: PageRun, begin: int, shard: int, timeout_s: float
    ) -> kvw.Loaded:
        self.loads += 1
        rows = np.zeros((len(run.blocks) - begin, self.block_bytes), np.uint8)
        loaded = space.load(keys=run.key_runs(begin), out=rows, shard=shard, timeout_s=timeout_s)
        self.scatter(run.blocks[begin : begin + int(loaded)], rows[: int(loaded)])
        return loaded


@pytest.fixture(scope="module")
def serving(cuda_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("disk"), dram="128MiB") as serving:
        yield serving


@pytest.fixture
def upkeep(serving: Serving) -> Iterator[Upkeep]:
    upkeep = Upkeep(serving.address, UpkeepOptions(tick_s=0.01))
    yield upkeep
    upkeep.close()


def space_of(page_bytes: int) -> kvw.Namespace:
    return kvw.Namespace(
        model="pinned",
        weights="w",
        dtype="any",
        layout="t/1",
        page_tokens=16,
        page_bytes=page_bytes,
    )


class Rig:
    """A cache, its memory as connectors have it, and what a test asks of both."""

    def __init__(
        self, device: ModelDevice, upkeep: Upkeep, rng: random.Random, name: str, dtype: str
    ) -> None:
        self.device, self.rng = device, rng
        self.cache = cache_of(device, name, dtype, rng)
        self.fallbacks = 0
        self.copies = DeviceCopies(0, self._fell_back)
        self.buffer = Buffer(self.cache)
        self.memory = PinnedMemory(
            self.cache.layout, self.cache.views, self.buffer, self.copies, ModelStream(device)
        )
        self.space = space_of(self.memory.block_bytes)
        self.results: list[kvw.StoreResult] = []
        self.outbox = Outbox(
            upkeep,
            SimpleNamespace(staging_bytes=STAGING_BYTES, store_timeout_s=TIMEOUT_S),
            0,
            lambda runs, result: self.results.append(result),
        )
        opened = upkeep.wait_opened(self.space, TIMEOUT_S)
        assert opened is not None
        self.opened = opened

    def _fell_back(self) -> None:
        self.fallbacks += 1

    def run(self, *blocks: int) -> PageRun:
        return PageRun(0, [self.rng.randbytes(32) for _ in blocks], list(blocks), True)

    def stored(self, count: int = 1) -> list[kvw.StoreResult]:
        until(lambda: len(self.results) == count, "what is queued is stored")
        return self.results

    def wipe(self) -> None:
        for memory in self.cache.memories:
            memory.fill(np.zeros(memory.size_bytes, np.uint8))

    def on_host(self, run: PageRun) -> np.ndarray[Any, np.dtype[np.uint8]]:
        rows = np.zeros((len(run.keys), self.memory.block_bytes), np.uint8)
        assert self.opened.load(keys=run.key_runs(), out=rows) == len(rows)
        return rows


Make = Callable[..., Rig]


@pytest.fixture
def make(device: ModelDevice, upkeep: Upkeep, rng: random.Random) -> Iterator[Make]:
    made: list[Rig] = []

    def rig(name: str = "NHD", dtype: str = "bfloat16") -> Rig:
        made.append(Rig(device, upkeep, rng, name, dtype))
        return made[-1]

    yield rig
    device.set("hold", 0)
    for each in made:
        each.outbox.close()


# --- bytes


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_go_out_and_come_back_byte_for_byte_past_host_memory(
    make: Make, name: str, dtype: str
) -> None:
    rig = make(name, dtype)
    before = rig.cache.pages()
    run = rig.run(7, 0, 3)
    assert rig.outbox.put([run], rig.space, rig.memory)
    assert rig.stored() == [kvw.StoreResult(3, 0, {})]
    assert np.array_equal(rig.on_host(run), before[run.blocks])
    rig.wipe()
    back = PageRun(0, run.keys, [1, 8, 4], True)
    rig.memory.after_engine()
    assert rig.memory.load(rig.opened, back, 0, 0, TIMEOUT_S) == 3
    after = rig.cache.pages()
    assert np.array_equal(after[[1, 8, 4]], before[run.blocks])
    assert not after[[0, 2, 3, 5, 6, 7]].any(), "nothing else was written"
    assert (rig.buffer.gathers, rig.buffer.loads) == (0, 0)


def test_groups_of_two_layouts_share_one_way_and_each_has_its_bytes(make: Make) -> None:
    """As in a hybrid model."""
    rigs = [make("HND", "bfloat16"), make("MLA", "int8")]
    rigs[1].memory._copies = rigs[0].copies
    before = [rig.cache.pages() for rig in rigs]
    runs = [rig.run(2, 5) for rig in rigs]
    for rig, run in zip(rigs, runs, strict=True):
        assert rig.outbox.put([run], rig.space, rig.memory)
    for rig, run, pages in zip(rigs, runs, before, strict=True):
        rig.stored()
        assert np.array_equal(rig.on_host(run), pages[run.blocks])


def test_load_goes_on_behind_what_has_come(make: Make) -> None:
    rig = make()
    before = rig.cache.pages()
    run = rig.run(0, 1, 2, 3)
    rig.outbox.put([run.cut(0, 2)], rig.space, rig.memory)
    rig.stored()
    rig.wipe()
    assert rig.memory.load(rig.opened, run, 0, 0, 0.0) == 2
    rig.cache.memories[0].fill(np.zeros(rig.cache.memories[0].size_bytes, np.uint8))
    late = rig.opened.store(keys=run.key_runs(2), pages=before[[2, 3]])
    assert late.stored == 2
    assert rig.memory.load(rig.opened, run, 2, 0, TIMEOUT_S) == 2
    assert np.array_equal(rig.cache.pages()[[2, 3]], before[[2, 3]])


# --- the engine's stream


def test_store_has_what_the_engine_had_queued_and_nothing_it_queued_later(make: Make) -> None:
    """Blocks change hands when a step is over, with a store of theirs under way."""
    rig = make()
    memory = rig.cache.memories[0]
    for number in range(5):
        computed, next_step = (
            np.frombuffer(rig.rng.randbytes(memory.size_bytes), np.uint8) for _ in range(2)
        )
        rig.device.set("hold", 1)
        memory.queue_fill(computed)
        run = rig.run(4, 6)
        assert rig.outbox.put([run], rig.space, rig.memory), "nobody waits for the stream"
        memory.queue_fill(next_step)
        rig.device.set("hold", 0)
        rig.stored(number + 1)
        until(ModelStream(rig.device).recorded().query, "the next step is over")
        assert np.array_equal(memory.data, next_step)
        row = computed.reshape(BLOCKS, -1)
        assert np.array_equal(rig.on_host(run)[:, : row.shape[1]], row[[4, 6]])


def test_store_does_not_begin_before_its_event(make: Make) -> None:
    rig = make()
    rig.device.set("hold", 1)
    run = rig.run(1)
    assert rig.outbox.put([run], rig.space, rig.memory)
    launches = rig.device.count("launches")
    assert not rig.results
    rig.device.set("hold", 0)
    assert rig.stored() == [kvw.StoreResult(1, 0, {})]
    assert rig.device.count("launches") > launches


def test_load_is_not_over_before_the_engine_has_left_its_blocks_and_its_copies_are_done(
    make: Make,
) -> None:
    rig = make()
    before = rig.cache.pages()
    run = rig.run(0, 5)
    rig.outbox.put([run], rig.space, rig.memory)
    rig.stored()
    junk = np.full(rig.cache.memories[0].size_bytes, 7, np.uint8)
    rig.device.set("hold", 1)
    for memory in rig.cache.memories:
        memory.queue_fill(junk)  # a step that still writes these blocks
    rig.memory.after_engine()
    ended: list[int] = []

    def load() -> None:
        assert rig.memory.engine_done(TIMEOUT_S) is not None
        ended.append(int(rig.memory.load(rig.opened, run, 0, 0, TIMEOUT_S)))

    thread = threading.Thread(target=load)
    thread.start()
    assert rig.memory.engine_done(0.05) is None
    assert not ended
    rig.device.set("hold", 0)
    thread.join(TIMEOUT_S)
    assert ended == [2]
    # At once: nothing is under way when a load is over.
    assert np.array_equal(rig.cache.pages()[[0, 5]], before[[0, 5]])
    assert (rig.cache.pages()[[1, 2]] == 7).all()


def test_load_itself_does_not_overtake_the_engine_either(make: Make) -> None:
    """The self-test and later parts of a load ask nobody whether the engine is done."""
    rig = make()
    before = rig.cache.pages()
    run = rig.run(0, 5)
    rig.outbox.put([run], rig.space, rig.memory)
    rig.stored()
    for memory in rig.cache.memories:
        memory.queue_fill(np.full(memory.size_bytes, 7, np.uint8))
    rig.memory.after_engine()
    step = ModelStream(rig.device).recorded()
    assert rig.memory.load(rig.opened, run, 0, 0, TIMEOUT_S) == 2
    until(step.query, "the step is over")
    assert np.array_equal(rig.cache.pages()[[0, 5]], before[[0, 5]])


def test_pages_of_a_load_are_pinned_before_its_copies_and_until_they_are_done(
    make: Make, upkeep: Upkeep
) -> None:
    rig = make()
    run = rig.run(0, 1, 2)
    rig.outbox.put([run], rig.space, rig.memory)
    rig.stored()
    rig.device.set("hold", 1)
    copies = rig.device.count("copies")
    thread = threading.Thread(target=rig.memory.load, args=(rig.opened, run, 0, 0, TIMEOUT_S))
    thread.start()
    until(lambda: rig.device.count("copies") > copies, "copies are queued")
    client = upkeep.client
    assert client is not None
    assert client.status()["core"]["pins"]["held"] == 3
    rig.device.set("hold", 0)
    thread.join(TIMEOUT_S)
    until(lambda: client.status()["core"]["pins"]["held"] == 0, "pins are dropped")


# --- bounds


def test_copies_on_the_device_are_bounded_and_their_room_comes_back(
    make: Make,
) -> None:
    rig = make("large", "bfloat16")  # 768 KiB a block: ten fit
    rig.device.set("hold", 1)
    assert rig.outbox.put([rig.run(*range(9))], rig.space, rig.memory)
    assert not rig.outbox.put([rig.run(0, 1)], rig.space, rig.memory)
    assert rig.outbox.put([rig.run(0)], rig.space, rig.memory)
    rig.device.set("hold", 0)
    assert [result.stored for result in rig.stored(2)] == [9, 1]
    until(lambda: rig.outbox._on_device.used_bytes == 0, "its room is given back")
    assert rig.outbox.put([rig.run(*range(9))], rig.space, rig.memory)
    rig.stored(3)


def test_device_without_memory_for_a_copy_stores_less_and_the_way_stays(make: Make) -> None:
    rig = make()
    stream: Any = rig.memory._stream
    stream.full = True
    assert not rig.outbox.put([rig.run(0)], rig.space, rig.memory)
    assert rig.outbox._on_device.used_bytes == 0
    stream.full = False
    assert rig.outbox.put([rig.run(0)], rig.space, rig.memory)
    assert rig.stored() == [kvw.StoreResult(1, 0, {})]
    assert rig.fallbacks == 0


# --- where the way is not there


def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVW_NVRTC", "/nonexistent/libnvrtc.so")
    kernels.nvrtc.cache_clear()
    kernels.compiled.cache_clear()


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    yield
    kernels.nvrtc.cache_clear()
    kernels.compiled.cache_clear()


def asked(stream: ModelStream, address: int, wish: str = "auto") -> tuple[Any, int]:
    """What device_copies answers, and how often it counted."""
    counted: list[None] = []
    found = device_copies(stream, address, wish, lambda: counted.append(None))
    return found, len(counted)


def test_way_is_there_where_driver_kernels_and_address_are(device: ModelDevice) -> None:
    found, counted = asked(ModelStream(device), device.allocate(64))
    assert (found.usable, found.reason, counted) == (True, "", 0)


@pytest.mark.usefixtures("fresh_kernels")
def test_each_reason_why_it_is_not_is_said_once_and_counted(
    device: ModelDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    address = device.allocate(64)
    for stream, at, words in (
        (ModelStream(device, "a device of type xpu"), address, "a device of type xpu"),
        (ModelStream(device), 4096, "not in the memory of a GPU"),
    ):
        caplog.clear()
        assert asked(stream, at) == (None, 1)
        assert [words in line for line in caplog.messages] == [True]
    caplog.clear()
    no_kernels(monkeypatch)
    assert asked(ModelStream(device), address) == (None, 1)
    assert ["NVRTC" in line for line in caplog.messages] == [True]


def test_way_that_is_not_wished_is_no_fallback(
    device: ModelDevice, caplog: pytest.LogCaptureFixture
) -> None:
    assert asked(ModelStream(device), device.allocate(64), "off") == (None, 0)
    assert not caplog.messages


@pytest.mark.usefixtures("fresh_kernels")
def test_compiler_that_is_missing_turns_all_to_the_buffer_and_says_so_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    before = rig.cache.pages()
    no_kernels(monkeypatch)
    run = rig.run(0, 1)
    assert rig.opened.store(keys=run.key_runs(), pages=before[[0, 1]]).stored == 2
    rig.wipe()
    caplog.clear()
    for _ in range(3):
        assert rig.memory.load(rig.opened, run, 0, 0, TIMEOUT_S) == 2
        assert np.array_equal(rig.cache.pages()[[0, 1]], before[[0, 1]])
    assert (rig.buffer.loads, rig.fallbacks) == (3, 1)
    said = [line for line in caplog.messages if "through a buffer" in line]
    assert len(said) == 1
    assert "NVRTC" in said[0]
    again = rig.run(0)
    assert rig.outbox.put([again], rig.space, rig.memory)
    rig.stored()
    assert rig.buffer.gathers == 1
    assert np.array_equal(rig.on_host(again), before[[0]])


@pytest.mark.usefixtures("fresh_kernels")
def test_store_whose_way_is_gone_is_dropped_and_the_next_goes_through_the_buffer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    no_kernels(monkeypatch)
    before = rig.cache.pages()
    assert rig.outbox.put([rig.run(0, 1)], rig.space, rig.memory)
    assert rig.stored() == [kvw.StoreResult(0, 0, {"unreachable": 2})]
    assert rig.fallbacks == 1
    run = rig.run(2)
    assert rig.outbox.put([run], rig.space, rig.memory)
    assert rig.stored(2)[1] == kvw.StoreResult(1, 0, {})
    assert np.array_equal(rig.on_host(run), before[[2]])
    until(lambda: rig.outbox._on_device.used_bytes == 0, "its room is given back")


def test_device_that_fails_in_the_middle_of_a_load_costs_no_byte(
    make: Make, device: ModelDevice
) -> None:
    """What it had written by then is overwritten by the buffer's load."""
    rig = make("large", "bfloat16")
    before = rig.cache.pages()
    run = rig.run(*range(BLOCKS))
    rig.outbox.put([run], rig.space, rig.memory)
    rig.stored()
    rig.wipe()
    rig.device.set("hold", 1)
    copies = rig.device.count("copies")
    ended: list[int] = []
    thread = threading.Thread(
        target=lambda: ended.append(int(rig.memory.load(rig.opened, run, 0, 0, TIMEOUT_S)))
    )
    thread.start()
    until(lambda: rig.device.count("copies") > copies, "copies are queued")
    rig.device.set("lost", 1)
    rig.device.set("hold", 0)
    thread.join(TIMEOUT_S)
    rig.device.set("lost", 0)
    assert ended == [BLOCKS]
    assert (rig.buffer.loads, rig.fallbacks) == (1, 1)
    assert np.array_equal(rig.cache.pages(), before)
    assert "ILLEGAL_ADDRESS" in rig.copies.reason


def test_page_that_was_damaged_is_a_miss_and_the_way_stays(make: Make, serving: Serving) -> None:
    rig = make()
    before = rig.cache.pages()
    run = rig.run(0, 1, 2)
    rig.outbox.put([run], rig.space, rig.memory)
    rig.stored()
    find_one([serving.arena_dir / "arena"], before[1]).flip(at=5000)
    rig.wipe()
    loaded = rig.memory.load(rig.opened, run, 0, 0, 0.0)
    assert (int(loaded), sum(loaded.missed.values())) == (1, 2)
    assert np.array_equal(rig.cache.pages()[0], before[0])
    assert rig.copies.usable
    assert (rig.buffer.loads, rig.fallbacks) == (0, 0)


def test_error_of_a_single_call_is_not_the_ways(make: Make) -> None:
    rig = make()

    class Refusing:
        def load(self, **_: Any) -> kvw.Loaded:
            raise kvw.PinError("no pins left", code="pin_budget")

    with pytest.raises(kvw.PinError):
        rig.memory.load(Refusing(), rig.run(0), 0, 0, 1.0)  # type: ignore[arg-type]
    assert rig.copies.usable
    assert rig.buffer.loads == 0


def test_load_of_a_device_that_hangs_goes_no_other_way(make: Make) -> None:
    """Its copies may still come, over whatever another way brings."""
    rig = make()

    class Hanging:
        def load(self, **_: Any) -> kvw.Loaded:
            raise kvw.StorageError("device 0 has not finished", code="gpu_stalled")

    with pytest.raises(kvw.StorageError) as raised:
        rig.memory.load(Hanging(), rig.run(0), 0, 0, 1.0)  # type: ignore[arg-type]
    assert may_still_write(raised.value)
    assert not rig.copies.usable
    assert (rig.buffer.loads, rig.fallbacks) == (0, 1)


def test_way_that_several_threads_give_up_is_given_up_once_for_the_first_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted: list[None] = []
    copies = DeviceCopies(0, lambda: counted.append(None))
    for reason in ("the first", "the second"):
        copies.give_up(reason)
    assert (copies.reason, len(counted), len(caplog.messages)) == ("the first", 1, 1)


# --- the proof


@pytest.mark.parametrize("name", LAYOUTS)
def test_way_is_proven_by_the_stores_and_loads_that_will_go_it(
    make: Make, upkeep: Upkeep, name: str
) -> None:
    rig = make(name)
    before = rig.cache.pages()
    launches = rig.device.count("launches")
    assert Proof(upkeep, stores=True).of_the_way(rig.memory, [3, 5])
    assert rig.device.count("launches") >= launches + 2
    assert rig.buffer.loads == 0
    assert np.array_equal(rig.cache.pages(), before)


def test_way_to_the_wrong_place_is_found_out(
    make: Make, upkeep: Upkeep, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make("keys then values")
    bases = rig.cache.layout.bases.copy()
    bases[:2] = bases[1::-1]  # keys and values of the first layer
    wrong = BlockLayout(
        rig.cache.layout.tensors,
        bases,
        rig.cache.layout.strides,
        rig.cache.layout.piece_bytes,
        "wrong",
    )
    rig.memory._layout = wrong
    assert not Proof(upkeep, stores=True).of_the_way(rig.memory, [3, 5])
    assert "came back with other bytes" in caplog.text
