"""The pinned path over a real GPU: the suite that the contract model of the driver passes too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.testing.device_suite import SPACE, DeviceSuite
from kvwarehouse.testing.serving import Serving


class TorchDevice:
    """The current device, and an engine's stream on it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._stream = torch.cuda.Stream()

    def array(self, data: Any) -> Any:
        return self._torch.from_numpy(np.array(data)).cuda()

    def read(self, array: Any) -> Any:
        # On the default stream, which the warehouse's streams do not wait for: the call that filled
        # `array` has returned, and that is all that is promised to be needed.
        return array.cpu().numpy()

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def queue_fill(self, array: Any, data: Any) -> Any:
        host = self._torch.from_numpy(np.array(data)).pin_memory()
        event = self._torch.cuda.Event()
        with self._torch.cuda.stream(self._stream):
            self._torch.cuda._sleep(20_000_000)  # cycles: long enough to be early without a wait
            array.copy_(host, non_blocking=True)
            event.record(self._stream)
        return event


@pytest.fixture(scope="session")
def device() -> TorchDevice:
    torch = pytest.importorskip("torch", reason="needs torch with CUDA")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use: torch.cuda.is_available() is False")
    return TorchDevice(torch)


@pytest.fixture
def client(device: TorchDevice, tmp_path: Path) -> Iterator[kvw.Client]:
    with Serving(tmp_path, dram="64MiB") as serving, serving.connect(timeout_s=60) as client:
        yield client


@pytest.fixture
def ns(client: kvw.Client) -> kvw.OpenNamespace:
    return client.open(SPACE)


class TestGpu(DeviceSuite):
    """The suite over a real device."""
