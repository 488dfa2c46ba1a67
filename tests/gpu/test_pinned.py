"""The pinned path over a real GPU, with arrays of torch and of CuPy: the suite that the contract
model of the driver passes too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving
from testkit.device_suite import SPACE, DeviceSuite


@pytest.fixture(scope="session")
def device(arrays: Any) -> Any:
    return arrays


@pytest.fixture
def client(device: Any, tmp_path: Path) -> Iterator[kvw.Client]:
    with Serving(tmp_path, dram="64MiB") as serving, serving.connect(timeout_s=60) as client:
        yield client


@pytest.fixture
def ns(client: kvw.Client) -> kvw.OpenNamespace:
    return client.open(SPACE)


class TestGpu(DeviceSuite):
    """The suite over a real device."""
