"""Where the straight way is not there, or ends, all goes through a buffer: counted, said once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse.client.gpu import kernels
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core.device_copies import DeviceCopies, device_copies, may_still_write
from pinned_parts.cache import BLOCKS
from pinned_parts.rig import TIMEOUT_S, Make
from testkit.cuda_model import ModelDevice
from testkit.cuda_tensors import ModelStream
from testkit.damage import find_one

pytestmark = pytest.mark.usefixtures("contract_kept")


def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVW_NVRTC", "/nonexistent/libnvrtc.so")
    kernels.compiled.cache_clear()


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    yield
    kernels.compiled.cache_clear()


def asked(stream: ModelStream, address: int, wish: str = "auto") -> tuple[Any, int]:
    """What device_copies answers, and how often it counted."""
    counted: list[None] = []
    found = device_copies(stream, address, wish, lambda: counted.append(None))
    return found, len(counted)


def test_way_is_there_where_driver_kernels_and_address_are(device: ModelDevice) -> None:
    found, counted = asked(ModelStream(device), device.allocate(64))
    assert (found.usable, found.reason, counted) == (True, "", 0)


@pytest.mark.usefixtures("fresh_kernels")
def test_each_reason_why_it_is_not_is_said_once_and_counted(
    device: ModelDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    address = device.allocate(64)
    for stream, at, words in (
        (ModelStream(device, "a device of type xpu"), address, "a device of type xpu"),
        (ModelStream(device), 4096, "not in the memory of a GPU"),
    ):
        caplog.clear()
        assert asked(stream, at) == (None, 1)
        assert [words in line for line in caplog.messages] == [True]
    caplog.clear()
    no_kernels(monkeypatch)
    assert asked(ModelStream(device), address) == (None, 1)
    assert ["NVRTC" in line for line in caplog.messages] == [True]


def test_way_that_is_not_wished_is_no_fallback(
    device: ModelDevice, caplog: pytest.LogCaptureFixture
) -> None:
    assert asked(ModelStream(device), device.allocate(64), "off") == (None, 0)
    assert not caplog.messages


@pytest.mark.usefixtures("fresh_kernels")
def test_compiler_that_is_missing_turns_all_to_the_buffer_and_says_so_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    before = rig.cache.pages()
    no_kernels(monkeypatch)
    run = rig.run(0, 1)
    assert rig.opened.store(keys=run.key_runs(), pages=before[[0, 1]]).stored == 2
    rig.wipe()
    caplog.clear()
    for _ in range(3):
        assert rig.memory.load(rig.opened, run, 0, 0, TIMEOUT_S) == 2
        assert np.array_equal(rig.cache.pages()[[0, 1]], before[[0, 1]])
    assert (rig.buffer.loads, rig.fallbacks) == (3, 1)
    said = [line for line in caplog.messages if "through a buffer" in line]
    assert len(said) == 1
    assert "NVRTC" in said[0]
    again = rig.run(0)
    assert rig.store_queue.put([again], rig.space, rig.memory)
    rig.stored()
    assert rig.buffer.gathers == 1
    assert np.array_equal(rig.on_host(again), before[[0]])


@pytest.mark.usefixtures("fresh_kernels")
def test_store_whose_way_is_gone_is_dropped_and_the_next_goes_through_the_buffer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    no_kernels(monkeypatch)
    before = rig.cache.pages()
    assert rig.store_queue.put([rig.run(0, 1)], rig.space, rig.memory)
    assert rig.stored() == [kvw.StoreResult(0, 0, {"unreachable": 2})]
    assert rig.fallbacks == 1
    run = rig.run(2)
    assert rig.store_queue.put([run], rig.space, rig.memory)
    assert rig.stored(2)[1] == kvw.StoreResult(1, 0, {})
    assert np.array_equal(rig.on_host(run), before[[2]])
    eventually(lambda: rig.store_queue._device_budget.used_bytes == 0, "its room is given back")


def test_device_that_fails_in_the_middle_of_a_load_costs_no_byte(
    make: Make, device: ModelDevice
) -> None:
    """What it had written by then is overwritten by the buffer's load."""
    rig = make("large", "bfloat16")
    before = rig.cache.pages()
    run = rig.run(*range(BLOCKS))
    rig.store_queue.put([run], rig.space, rig.memory)
    rig.stored()
    rig.wipe()
    rig.device.set("hold", 1)
    copies = rig.device.count("copies")
    ended: list[int] = []
    thread = threading.Thread(
        target=lambda: ended.append(int(rig.memory.load(rig.opened, run, 0, 0, TIMEOUT_S)))
    )
    thread.start()
    eventually(lambda: rig.device.count("copies") > copies, "copies are queued")
    rig.device.set("lost", 1)
    rig.device.set("hold", 0)
    thread.join(TIMEOUT_S)
    rig.device.set("lost", 0)
    assert ended == [BLOCKS]
    assert (rig.buffer.loads, rig.fallbacks) == (1, 1)
    assert np.array_equal(rig.cache.pages(), before)
    assert "ILLEGAL_ADDRESS" in rig.copies.reason


def test_page_that_was_damaged_is_a_miss_and_the_way_stays(make: Make, serving: Serving) -> None:
    rig = make()
    before = rig.cache.pages()
    run = rig.run(0, 1, 2)
    rig.store_queue.put([run], rig.space, rig.memory)
    rig.stored()
    find_one([serving.arena_dir / "arena"], before[1]).flip(at=5000)
    rig.wipe()
    loaded = rig.memory.load(rig.opened, run, 0, 0, 0.0)
    assert (int(loaded), sum(loaded.missed.values())) == (1, 2)
    assert np.array_equal(rig.cache.pages()[0], before[0])
    assert rig.copies.usable
    assert (rig.buffer.loads, rig.fallbacks) == (0, 0)


def test_error_of_a_single_call_is_not_the_ways(make: Make) -> None:
    rig = make()

    class Refusing:
        def load(self, **_: Any) -> kvw.Loaded:
            raise kvw.PinError("no pins left", code="pin_budget")

    with pytest.raises(kvw.PinError):
        rig.memory.load(Refusing(), rig.run(0), 0, 0, 1.0)  # type: ignore[arg-type]
    assert rig.copies.usable
    assert rig.buffer.loads == 0


def test_load_of_a_device_that_hangs_goes_no_other_way(make: Make) -> None:
    """Its copies may still come, over whatever another way brings."""
    rig = make()

    class Hanging:
        def load(self, **_: Any) -> kvw.Loaded:
            raise kvw.StorageError("device 0 has not finished", code="gpu_stalled")

    with pytest.raises(kvw.StorageError) as raised:
        rig.memory.load(Hanging(), rig.run(0), 0, 0, 1.0)  # type: ignore[arg-type]
    assert may_still_write(raised.value)
    assert not rig.copies.usable
    assert (rig.buffer.loads, rig.fallbacks) == (0, 1)


def test_kernels_are_loaded_for_who_gathers_and_once(device: ModelDevice) -> None:
    loaded = device.count("modules")
    copies = DeviceCopies(0, lambda: None)
    assert device.count("modules") == loaded
    assert copies.gather is copies.gather
    assert device.count("modules") == loaded + 1


def test_way_that_several_threads_give_up_is_given_up_once_for_the_first_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted: list[None] = []
    copies = DeviceCopies(0, lambda: counted.append(None))
    for reason in ("the first", "the second"):
        copies.give_up(reason)
    assert (copies.reason, len(counted), len(caplog.messages)) == ("the first", 1, 1)
