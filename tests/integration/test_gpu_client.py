"""Pages in the memory of a GPU, by the public client against a real daemon and the contract model
of CUDA's driver. It needs no GPU: tests/gpu runs the same suite over one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.client.gpu import kernels
from kvwarehouse.client.gpu.memory import event_of
from kvwarehouse.testing import cuda_model
from kvwarehouse.testing.client_process import ClientProcess
from kvwarehouse.testing.cuda_model import ModelDevice
from kvwarehouse.testing.device_suite import PAGE_BYTES, PAGES, SPACE, DeviceSuite, noise, prompt
from kvwarehouse.testing.serving import Serving
from kvwarehouse.testing.until import until


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, dram="16MiB", limbo_after_s="0.3", grace_s="0.2") as serving:
        yield serving


@pytest.fixture
def client(serving: Serving) -> Iterator[kvw.Client]:
    with serving.connect(timeout_s=60) as client:
        yield client


@pytest.fixture
def ns(client: kvw.Client) -> kvw.OpenNamespace:
    return client.open(SPACE)


class TestModel(DeviceSuite):
    """The suite over the model."""

    def test_model_saw_no_broken_rule(
        self, device: ModelDevice, client: kvw.Client, ns: Any
    ) -> None:
        # Of a device that failed, as another file's tests let it, a client keeps its registration.
        kept = device.count("registered_bytes")
        array = device.array(noise(1))
        assert ns.store(prompt(1), array).stored == PAGES
        assert ns.load(prompt(1), array) == PAGES
        client.close()
        assert device.count("violations") == 0
        assert device.count("unpinned_copies") == 0
        assert device.count("registered_bytes") == kept


def test_array_of_a_device_is_refused_when_its_type_order_or_rights_do_not_fit(
    device: ModelDevice, ns: Any
) -> None:
    wrong = {
        "typestr": ("<f2", "expected uint8"),
        "strides": ((2 * PAGE_BYTES, 1), "copy it first"),
        "data": ((device.array(noise(1)).address, True), "read-only"),
    }
    for field, (value, words) in wrong.items():
        array = device.array(noise(1))
        array.__cuda_array_interface__[field] = value
        with pytest.raises(kvw.UsageError, match=words):
            ns.load(prompt(1), array)


def test_events_are_taken_from_torch_from_cupy_and_as_addresses() -> None:
    torch_event = type("Event", (), {"cuda_event": 77})()
    cupy_event = type("Event", (), {"ptr": 78})()
    assert [event_of(each) for each in (None, 5, torch_event, cupy_event)] == [0, 5, 77, 78]
    for wrong in (0, -1, True, "event", type("Event", (), {"cuda_event": 0})()):
        with pytest.raises(kvw.UsageError, match="event"):
            event_of(wrong)


def test_kernels_without_a_compiler_are_refused_with_where_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels.nvrtc.cache_clear()
    monkeypatch.setenv("KVW_NVRTC", "/nonexistent/libnvrtc.so")
    with pytest.raises(kvw.UsageError, match="nvidia-cuda-nvrtc-cu12") as refused:
        kernels.nvrtc()
    assert refused.value.code == "no_nvrtc"
    kernels.nvrtc.cache_clear()


def test_source_that_does_not_compile_is_refused_with_the_compilers_words(
    cuda_driver: Path,
) -> None:
    kernels.nvrtc.cache_clear()
    with pytest.raises(kvw.WarehouseError, match="no kernels"):
        kernels.compile_source(kernels.nvrtc(), b"int nothing;", "compute_90")
    kernels.nvrtc.cache_clear()


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_kernels_compile_for_real_architectures(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVW_NVRTC", raising=False)
    kernels.nvrtc.cache_clear()
    try:
        library = kernels.nvrtc()
    except kvw.UsageError as missing:
        pytest.skip(f"needs NVRTC: {missing}")
    finally:
        kernels.nvrtc.cache_clear()
    ptx = kernels.compile_source(library, kernels.SOURCE.read_bytes(), architecture)
    assert ".entry kvw_gather" in ptx
    assert ".entry kvw_scatter" in ptx


# --- a client that dies while the device is at work

# Holds the device, then stores or loads; says so before it does.
VICTIM = """
os.environ.update(given["environment"])
from pathlib import Path
from kvwarehouse.testing.cuda_model import ModelDevice
from kvwarehouse.testing.device_suite import SPACE, noise, prompt
device = ModelDevice(Path(given["folder"]))
array = device.array(noise(1))
ns = client.open(SPACE)
device.set("hold", 1)
say("ready")
getattr(ns, given["call"])(prompt(1), array)
"""


def victim(serving: Serving, model: Path, call: str) -> ClientProcess:
    process = ClientProcess(
        serving.address,
        VICTIM,
        call=call,
        folder=str(model),
        environment=cuda_model.environment(model),
    )
    assert process.hear() == "ready"
    return process


def core(client: kvw.Client) -> Any:
    return client.status()["core"]


def dram(client: kvw.Client) -> Any:
    return core(client)["tiers"]["dram"]


def fill(client: kvw.Client, first: int) -> None:
    """More prompts than the arena has room for."""
    ns = client.open(SPACE)
    for number in range(first, first + 300):
        ns.store(prompt(number), noise(number), timeout_s=60)


@pytest.mark.timeout(240)
def test_slots_that_a_killed_clients_device_may_write_to_are_nobodys_until_the_grace_is_over(
    cuda_driver: Path, tmp_path: Path
) -> None:
    with (
        Serving(tmp_path, dram="16MiB", limbo_after_s="0.2", grace_s="3600") as serving,
        serving.connect(timeout_s=60) as client,
        victim(serving, cuda_driver, "store") as process,
    ):
        until(lambda: dram(client)["reserved_slots"] == PAGES, "the device has slots to write to")
        process.kill()
        until(lambda: dram(client)["limbo_slots"] == PAGES, "they are in limbo")
        fill(client, 1000)
        assert dram(client)["limbo_slots"] == PAGES


@pytest.mark.timeout(240)
def test_slots_of_a_killed_clients_device_come_back_after_the_grace(
    cuda_driver: Path, serving: Serving, client: kvw.Client, ns: Any
) -> None:
    with victim(serving, cuda_driver, "store") as process:
        until(lambda: dram(client)["reserved_slots"] == PAGES, "the device has slots to write to")
        process.kill()
    until(
        lambda: dram(client)["reserved_slots"] + dram(client)["limbo_slots"] == 0, "they are free"
    )
    assert ns.store(prompt(1), noise(1), timeout_s=60).stored == PAGES


@pytest.mark.timeout(240)
def test_pages_that_a_killed_clients_device_may_read_stay_until_the_grace_is_over(
    cuda_driver: Path, tmp_path: Path
) -> None:
    with (
        Serving(tmp_path, dram="16MiB", grace_s="3600") as serving,
        serving.connect(timeout_s=60) as client,
    ):
        ns = client.open(SPACE)
        assert ns.store(prompt(1), noise(1)).stored == PAGES
        with victim(serving, cuda_driver, "load") as process:
            until(lambda: core(client)["pins"]["held"] == PAGES, "the device has pages to read")
            process.kill()
        fill(client, 1000)
        out = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        assert ns.load(prompt(1), out) == PAGES
        assert (out == noise(1)).all()
