"""Held extents of a real daemon, read into a real device's memory by kvikio, verified and scattered
there: the bytes are those that were stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.gpu import DeviceStagingArea, LoadPath, select_path
from kvwarehouse.gpu.file_reader import KvikioReader
from kvwarehouse.gpu.nvme_reader import NvmeReader
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.harness.serving import Serving
from testkit.gpu_devices import TorchDevice

PAGES, PAGE_BYTES, PAGE_TOKENS = 200, 1_000_000, 4

pytestmark = pytest.mark.usefixtures("device")


def space() -> kvw.Namespace:
    return kvw.Namespace(
        model="gpu",
        weights="w",
        dtype="uint8",
        layout="test/1",
        page_tokens=PAGE_TOKENS,
        page_bytes=PAGE_BYTES,
    )


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("nvme")
    with Serving(folder, dram="512MiB", nvme_capacity="2GiB") as serving:
        with serving.connect() as client:
            rows = pages_of(range(PAGES), 0, 0, PAGE_BYTES)
            ids = np.arange(PAGES * PAGE_TOKENS)
            assert client.open(space()).store(ids, rows, timeout_s=60).stored == PAGES
            assert client.flush().pending == 0
            client.evict(None, 100_000, "dram")
        yield serving


def read(serving: Serving, torch_device: TorchDevice, *, gds: bool) -> Any:
    """What the device's memory has then."""
    out = torch_device.array(np.zeros((PAGES, PAGE_BYTES), np.uint8))
    with serving.connect() as client:
        ns = client.open(space())
        staging = DeviceStagingArea(ns, out.device.index, 16 << 20)
        with NvmeReader(KvikioReader(gds=gds), staging) as reader:
            loaded = reader.load(ns, np.arange(PAGES * PAGE_TOKENS), out, timeout_s=60)
            assert reader.failures == {}
            assert reader.pages_read == PAGES
    assert loaded == PAGES
    return torch_device.read(out)


@pytest.mark.usefixtures("kvikio_there")
def test_kvikio_brings_pages_to_the_device_through_its_own_buffers(
    serving: Serving, torch_device: TorchDevice
) -> None:
    check_pages(read(serving, torch_device, gds=False), range(PAGES), 0, 0)


@pytest.mark.usefixtures("gds_there")
def test_gpudirect_storage_brings_pages_to_the_device(
    serving: Serving, torch_device: TorchDevice
) -> None:
    check_pages(read(serving, torch_device, gds=True), range(PAGES), 0, 0)


def test_a_way_is_chosen_by_what_was_measured_here(serving: Serving, tmp_path: Path) -> None:
    choice = select_path(serving.nvme_dir / "segments", memory=tmp_path / "memory")
    assert choice.rates.bytes_per_s[LoadPath.DRAM] > 0
    assert choice.path in choice.rates.bytes_per_s
    assert select_path(serving.nvme_dir / "segments", memory=tmp_path / "memory").remembered
