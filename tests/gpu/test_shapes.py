"""Pages of many shapes on a real GPU: the suite that the model of the driver passes too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving
from testkit.gpu_devices import TorchDevice
from testkit.shape_suite import ShapeSuite


@pytest.fixture(scope="session")
def device(torch_device: TorchDevice) -> TorchDevice:
    return torch_device


@pytest.fixture(scope="module")
def client(device: TorchDevice, tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvw.Client]:
    folder = tmp_path_factory.mktemp("shapes")
    with Serving(folder, dram="256MiB") as serving, serving.connect(timeout_s=60) as client:
        yield client


class TestGpu(ShapeSuite):
    """The suite over a real device."""
