"""Tests that need a GPU: make test-gpu. Each asks for `device`, and is skipped with the reason
without one; a skip is no pass, and docs/gpu.md says which of them have run, and on what."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvwarehouse.gpu import Machine, probe_machine
from testkit.gpu_devices import CupyDevice, TorchDevice


@pytest.fixture(scope="session")
def machine() -> Machine:
    return probe_machine()


@pytest.fixture(scope="session")
def device(machine: Machine) -> int:
    """The number of the device to test on: the first, or KVW_TEST_DEVICE."""
    if not machine.has_device:
        pytest.skip(machine.describe()[0])
    return int(os.environ.get("KVW_TEST_DEVICE", "0"))


@pytest.fixture(scope="session")
def kvikio_there(machine: Machine, device: int) -> None:
    if not machine.kvikio:
        pytest.skip(machine.describe()[1])


@pytest.fixture(scope="session")
def gds_there(machine: Machine, kvikio_there: None) -> None:
    if not machine.gds:
        pytest.skip(machine.describe()[2])


@pytest.fixture(scope="session")
def torch_device() -> TorchDevice:
    torch = pytest.importorskip("torch", reason="needs torch with CUDA")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use: torch.cuda.is_available() is False")
    return TorchDevice(torch)


@pytest.fixture(scope="session")
def cupy_device() -> CupyDevice:
    # CuPy without a CUDA that fits it is an ImportError.
    cupy = pytest.importorskip("cupy", reason="needs CuPy", exc_type=ImportError)
    if not cupy.cuda.is_available():
        pytest.skip("needs a GPU that CuPy can use: cupy.cuda.is_available() is False")
    return CupyDevice(cupy)


@pytest.fixture(scope="session", params=["torch", "cupy"])
def arrays(request: pytest.FixtureRequest) -> Any:
    """A device whose arrays are that library's."""
    return request.getfixturevalue(f"{request.param}_device")
