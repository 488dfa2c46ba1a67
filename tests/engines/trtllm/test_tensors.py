"""Blocks in torch tensors: the pool of KVCacheManager and the regions of KVCacheManagerV2, on the
CPU. The way for devices, through a buffer in host memory, moves the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: make test-trtllm installs it")

import torch

import kvwarehouse as kvw
from kvwarehouse_connectors.core.device_memory import DeviceMemory
from kvwarehouse_connectors.core.layout_self_test import check_tensors
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.trtllm.parts import Part, layout_cache, pool_cache
from trtllm_model.pools import PoolLayout, Region
from trtllm_model.ranks import Engine, Spec

BLOCKS = 7


def pool_tensor() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(BLOCKS, 3, 2, 2 * 8 * 16, dtype=torch.bfloat16)


def region_tensors(layout: PoolLayout, group: int) -> list[torch.Tensor]:
    """As KvCacheRegion.as_tensor gives them: rows of a larger memory."""
    return [
        torch.from_numpy(region.memory)[:, region.offset : region.offset + region.size]
        for region in layout.groups[group].regions
    ]


def parts() -> dict[str, tuple[Part, list[torch.Tensor]]]:
    tensor = pool_tensor()
    layout = PoolLayout(0, BLOCKS, 8, (20,))
    for group in layout.groups:
        memory = group.regions[0].memory
        memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, np.uint8)
    cache = layout_cache(
        type("Layout", (), {"tokens_per_block": 8, "groups": tuple(layout.groups)})()
    )
    by_group = {(part.group.index, part.replicated): part for part in cache.parts}
    return {
        "pool": (pool_cache(tensor, 8).parts[0], [tensor]),
        "regions": (by_group[0, False], region_tensors(layout, 0)),
        "window": (by_group[1, False], region_tensors(layout, 1)),
    }


@pytest.mark.parametrize("kind", ["pool", "regions", "window"])
def test_layout_of_a_part_is_proven_on_its_tensors(kind: str) -> None:
    part, views = parts()[kind]
    before = [view.clone() for view in views]
    check_tensors(part.memory, views, part.slots)
    assert all(torch.equal(one, two) for one, two in zip(before, views, strict=True))


class BesideTheEngine(DeviceMemory):
    """Scatters on a stream of its own, as on a device: before what the engine's stream has queued,
    zeros here, unless it was told to come after that."""

    told = False

    def after_engine(self) -> None:
        self.told = True

    def scatter(self, blocks: Any, rows: Any) -> None:
        super().scatter(blocks, rows)
        for view in self._views if not self.told else ():
            view[list(blocks)] = 0
        self.told = False


def test_layout_is_proven_after_what_the_engine_has_queued() -> None:
    """The zeros between the proof's two halves were on the engine's stream, and could be written
    over what was scattered: a good cache was refused."""
    part, views = parts()["pool"]
    before = [view.clone() for view in views]
    check_tensors(BesideTheEngine(views), views, part.slots)
    assert all(torch.equal(one, two) for one, two in zip(before, views, strict=True))


@pytest.mark.parametrize("kind", ["pool", "regions", "window"])
def test_way_for_devices_moves_the_same_bytes(kind: str) -> None:
    part, views = parts()[kind]
    device = DeviceMemory(views)
    assert device.block_bytes == part.page_bytes
    blocks = [4, 0, 2]
    one, two = (np.zeros((3, part.page_bytes), np.uint8) for _ in range(2))
    part.memory.gather(blocks, one)
    device.gather(blocks, two)
    device.settle()
    assert np.array_equal(one, two)
    rows = np.random.default_rng(2).integers(0, 256, one.shape, np.uint8)
    device.scatter(blocks, rows)
    part.memory.gather(blocks, one)
    assert np.array_equal(one, rows)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "bfloat16", "float32"])
def test_way_for_devices_moves_every_type_of_a_cache(dtype: str) -> None:
    """A cache of 8-bit floats could be stored but not loaded: torch copies none by index."""
    tensor = torch.zeros(BLOCKS, 2, 8, dtype=getattr(torch, dtype))
    device = DeviceMemory([tensor])
    rows = np.random.default_rng(2).integers(0, 256, (2, device.block_bytes), np.uint8)
    device.scatter([4, 1], rows)
    assert np.array_equal(tensor[[4, 1]].view(torch.uint8).reshape(2, -1).numpy(), rows)
    back = np.zeros_like(rows)
    device.gather([4, 1], back)
    device.settle()
    assert np.array_equal(back, rows)


class Streaming:
    """In a stream's place: what is asked of it, and of `aside`, in its order."""

    def __init__(self, done: list[str], name: str) -> None:
        self._done, self._name = done, name

    def __enter__(self) -> None:
        self._done.append(self._name)

    def __exit__(self, *unused: object) -> None:
        self._done.append(f"/{self._name}")

    def synchronize(self) -> None:
        self._done.append("wait")


def test_way_for_devices_waits_aside_from_what_the_engine_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr("kvwarehouse.gpu.relaxed_capture_mode", lambda: Streaming(done, "aside"))
    device = DeviceMemory([pool_tensor()])
    monkeypatch.setattr(device, "_in", Streaming(done, "in"))
    monkeypatch.setattr(device, "_out", Streaming(done, "out"))
    device.scatter([1], np.zeros((1, device.block_bytes), np.uint8))
    assert done == ["aside", "in", "/in", "wait", "/aside"]
    done.clear()
    device.settle()
    assert done == ["aside", "wait", "/aside"]


def test_way_for_devices_loads_from_the_warehouse_past_its_buffer(monkeypatch: Any) -> None:
    monkeypatch.setattr("kvwarehouse_connectors.core.device_memory._BUFFER_BYTES", 1)
    tensor = pool_tensor()
    part = pool_cache(tensor, 8).parts[0]
    rows = np.random.default_rng(3).integers(0, 256, (3, part.page_bytes), np.uint8)
    run = PageRun(0, [b"a", b"b", b"c"], [5, 1, 3], True)
    with kvw.embedded(dram="64MiB") as client:
        space = client.open(
            kvw.Namespace("m", "w", "bfloat16", "t/1", 8, part.page_bytes, hash_scheme="t")
        )
        space.store(keys=run.key_runs(), pages=rows)
        memory, done = DeviceMemory([tensor]), 0
        while done < 3:
            done += int(memory.load(space, run, done, 0, 5.0))
    back = np.zeros_like(rows)
    part.memory.gather(run.blocks, back)
    assert np.array_equal(back, rows)


def test_engine_of_the_model_reuses_blocks_of_torch_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The contract model's engine, its pool a torch tensor over the same memory."""
    monkeypatch.setenv("TLLM_KVW_WEIGHTS", "model-1")
    monkeypatch.setenv("TLLM_KVW_LOOKUP_BUDGET_S", "10")
    monkeypatch.setattr(
        "trtllm_model.pools.PoolTensor.register",
        lambda self, worker: worker.register_kv_caches(torch.from_numpy(self.tensor.array)),
    )
    tokens = list(range(60))
    with kvw.embedded(dram="64MiB") as client:
        for expected in (0, 56):
            with Engine(Spec(), client.address) as engine:
                assert engine.ready().serve(tokens, 3) == expected
                engine.wait_stored(0 if expected else 7)


def test_regions_of_the_model_are_where_they_say() -> None:
    region: Region = PoolLayout(0, BLOCKS, 8, ()).groups[0].regions[1]
    assert region.as_tensor().data_ptr() == region.base
