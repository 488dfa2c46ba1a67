"""Blocks of an engine's cache from NVMe, by the path that was chosen: over a real daemon and its
real segments, and contract models of kvikio and of CUDA's driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse.gpu import AutoPath, LoadPath, auto_path
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core.device_copies import device_copies
from pinned_parts.cache import LAYOUTS
from pinned_parts.rig import TIMEOUT_S, Make, Rig
from testkit.cuda_model import ModelDevice
from testkit.cuda_tensors import ModelStream
from testkit.gpu_paths import Choosing, kvikio_of

pytestmark = pytest.mark.usefixtures("contract_kept")

ROUNDS = 8  # with a failure each, after which a path is given up


@pytest.fixture(scope="module")
def serving(cuda_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("disk")
    with Serving(folder, dram="128MiB", nvme_capacity="64MiB") as serving:
        yield serving


@pytest.fixture
def chosen(device: ModelDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AutoPath, Any]]:
    """A path and the model of kvikio that it uses."""
    monkeypatch.setattr(auto_path, "LEAST_BYTES", 4096)
    kvikio = kvikio_of(device)
    path = AutoPath(0, select=Choosing(LoadPath.GDS), library=kvikio)
    yield path, kvikio
    path.close()
    eventually(lambda: not kvikio.open, "its files are closed")


def to_nvme(serving: Serving) -> None:
    with serving.connect() as admin:
        assert admin.flush().pending == 0
        admin.evict(None, 100_000, "dram")


def loaded(rig: Rig, run: Any) -> int:
    rig.wipe()
    rig.memory.after_engine()
    return int(rig.memory.load(rig.opened, run, 0, 0, TIMEOUT_S))


def find_path(rig: Rig, path: AutoPath) -> None:
    eventually(lambda: loaded(rig, rig.run(0)) == 0 and path._reader, "the path is ready")


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_from_nvme_by_the_path_byte_for_byte(
    name: str, make: Make, serving: Serving, chosen: Any
) -> None:
    path, kvikio = chosen
    rig = make(name, path=path)
    run = rig.run(5, 0, 3, 4)
    before = rig.cache.pages()
    rig.store_queue.put([run], rig.space, rig.memory)
    rig.stored()
    to_nvme(serving)
    find_path(rig, path)
    assert loaded(rig, run) == 4
    assert kvikio.reads > 0
    assert (rig.cache.pages()[run.blocks] == before[run.blocks]).all()
    assert rig.opened.lookup(keys=run.keys).by_tier == {"hbm": 0, "dram": 0, "nvme": 4, "remote": 0}
    # Used again, they come into DRAM.
    assert loaded(rig, run) == 4
    assert (rig.cache.pages()[run.blocks] == before[run.blocks]).all()
    assert rig.opened.lookup(keys=run.keys).by_tier == {"hbm": 0, "dram": 4, "nvme": 0, "remote": 0}
    assert (rig.buffer.loads, rig.fallbacks) == (0, 0)


def test_path_that_fails_leaves_the_straight_way_from_the_arena(
    make: Make, serving: Serving, chosen: Any
) -> None:
    path, kvikio = chosen
    rig = make(path=path)
    before = rig.cache.pages()
    runs = [rig.run(1, 6, 2) for _ in range(ROUNDS)]
    rig.store_queue.put(runs, rig.space, rig.memory)
    rig.stored()
    to_nvme(serving)
    find_path(rig, path)
    kvikio.error = RuntimeError("cuFile: error 5028")
    for run in runs:
        assert loaded(rig, run) == 3
        assert (rig.cache.pages()[run.blocks] == before[run.blocks]).all()
    assert "5028" in path.problem
    assert rig.copies.usable
    assert (rig.buffer.loads, rig.fallbacks) == (0, 0)


@pytest.mark.parametrize(("wish", "has"), [("auto", True), ("arena", False)])
def test_wish_says_whether_a_path_is_looked_for(device: ModelDevice, wish: str, has: bool) -> None:
    copies = device_copies(ModelStream(device), device.allocate(64), wish, lambda: None)
    assert copies is not None
    assert isinstance(copies._lane, kvw.gpu.AutoPath) == has
