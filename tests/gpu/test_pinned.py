"""The pinned path over a real GPU: the suite that the contract model of the driver passes too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvwarehouse as kvw
from kvwarehouse.testing.device_suite import SPACE, DeviceSuite
from kvwarehouse.testing.serving import Serving
from kvwarehouse.testing.torch_device import TorchDevice


@pytest.fixture(scope="session")
def device(torch_device: TorchDevice) -> TorchDevice:
    return torch_device


@pytest.fixture
def client(device: TorchDevice, tmp_path: Path) -> Iterator[kvw.Client]:
    with Serving(tmp_path, dram="64MiB") as serving, serving.connect(timeout_s=60) as client:
        yield client


@pytest.fixture
def ns(client: kvw.Client) -> kvw.OpenNamespace:
    return client.open(SPACE)


class TestGpu(DeviceSuite):
    """The suite over a real device."""
