"""The HBM tier over a real GPU: the suite that the contract model of the driver passes too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvwarehouse_bench.harness.serving import Serving
from testkit.gpu_devices import TorchDevice
from testkit.hbm_suite import HbmSuite


@pytest.fixture(scope="session")
def device(torch_device: TorchDevice) -> TorchDevice:
    return torch_device


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    # A real device gives memory in pieces of 2 MiB.
    with Serving(tmp_path, dram="64MiB", hbm="8MiB", grace_s="0.2") as serving:
        yield serving


class TestGpu(HbmSuite):
    """The suite over a real device."""
