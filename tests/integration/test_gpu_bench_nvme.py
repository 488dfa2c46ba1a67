"""What bench/gpu.py measures NVMe with is there, on the disk; the disk itself is measured by it,
and so are loads to the contract model of a device. No time is asserted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwarehouse.gpu import Choice, LoadPath, Machine, Rates, reader
from kvwarehouse.gpu.path_benchmark import LEAST_BYTES, disk_rate, written
from kvwarehouse_bench.gpu.nvme import PAGE_BYTES, fill, load_rate
from kvwarehouse_bench.harness.serving import Serving
from testkit.cuda_model import ModelDevice
from testkit.gpu_paths import KvikioModel

PAGES = 33


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="128MiB", nvme_capacity="256MiB") as serving:
        yield serving


def test_pages_for_the_measurement_reach_the_disk(serving: Serving) -> None:
    with serving.connect() as client:
        fill(client, PAGES)
    segments = serving.nvme_dir / "segments"
    assert sum(size for _, _, size in written(segments)) >= 2 * LEAST_BYTES
    assert disk_rate(segments) > 0


@pytest.mark.usefixtures("contract_kept")
@pytest.mark.parametrize("path", [LoadPath.GDS, LoadPath.DRAM])
def test_loads_that_are_measured_bring_the_pages(
    serving: Serving, device: ModelDevice, path: LoadPath
) -> None:
    def write(target: Any, data: bytes) -> None:
        device.poke(target.address, np.frombuffer(data, np.uint8))

    address = device.allocate(PAGES * PAGE_BYTES)
    with serving.connect(timeout_s=60) as client:
        opened = fill(client, PAGES)
        choice = Choice(path, "chosen by the test", Machine(), Rates())
        past_daemon = reader(opened, 0, choice, library=KvikioModel(write))
        assert (past_daemon is None) == (path is LoadPath.DRAM)
        load = partial(past_daemon.load, opened) if past_daemon else opened.load
        segments = serving.nvme_dir / "segments"
        assert load_rate(client, load, address, PAGES, segments) > 0
        host = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        assert opened.load(np.arange(PAGES * 16), host, timeout_s=60) == PAGES
        if past_daemon is not None:
            assert past_daemon.failures == {}
            past_daemon.close()
    assert (device.peek(address, host.nbytes) == host.reshape(-1)).all()
