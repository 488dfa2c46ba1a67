"""Stores and loads of arrays whose kernels are still to run, and nobody synchronises: who does not
wait meets the wrong bytes for some tenths of a second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from testkit.device_suite import PAGE_BYTES, PAGES, SPACE, noise, prompt

CYCLES = 500_000_000  # some tenths of a second
TIMEOUT_S = 60.0
STREAMS = ("engine", "default")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("streams"), dram="64MiB") as serving:
        yield serving


@pytest.fixture
def ns(arrays: Any, serving: Serving) -> Iterator[kvw.OpenNamespace]:
    """What a client does once, and what may wait for the device, has been done: its kernels are
    loaded, its movers have their memory."""
    with serving.connect(timeout_s=TIMEOUT_S) as client:
        client.clear(all=True)
        ns = client.open(SPACE)
        array = arrays.array(noise(0))
        assert ns.store(prompt(0), array, timeout_s=TIMEOUT_S).stored == PAGES
        assert ns.load(prompt(0), array, timeout_s=TIMEOUT_S) == PAGES
        yield ns


def on_host(ns: kvw.OpenNamespace, number: int) -> Any:
    rows = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    assert ns.load(prompt(number), rows, timeout_s=TIMEOUT_S) == PAGES
    return rows


@pytest.mark.parametrize("stream", STREAMS)
def test_store_reads_what_the_kernels_before_it_write(
    arrays: Any, ns: kvw.OpenNamespace, stream: str
) -> None:
    array, data = arrays.array(noise(1)), noise(2)
    with arrays.current(stream):
        event = arrays.queue_fill(array, data, stream, CYCLES)
        assert not arrays.happened(event), "the kernels are still to run"
        assert ns.store(prompt(1), array, timeout_s=TIMEOUT_S).stored == PAGES
        assert arrays.happened(event)
    assert (on_host(ns, 1) == data).all()


@pytest.mark.parametrize("stream", STREAMS)
def test_load_writes_after_the_kernels_before_it(
    arrays: Any, ns: kvw.OpenNamespace, stream: str
) -> None:
    array = arrays.array(noise(1))
    with arrays.current(stream):
        event = arrays.queue_fill(array, noise(2), stream, CYCLES)
        assert not arrays.happened(event), "the kernels are still to run"
        assert ns.load(prompt(0), array, timeout_s=TIMEOUT_S) == PAGES
    eventually(lambda: arrays.happened(event), "nobody writes to it any more")
    assert (arrays.read(array) == noise(0)).all()


def test_blocks_of_a_cache_are_behind_the_stream_of_its_tensor(
    arrays: Any, ns: kvw.OpenNamespace
) -> None:
    cache, data = arrays.array(noise(1)), noise(2)
    rows = np.arange(PAGES).reshape(-1, 1)
    regions = kvw.Regions.strided(
        [cache], [arrays.address(cache)], [PAGE_BYTES], [PAGE_BYTES], rows
    ).on_device()
    with arrays.current("engine"):
        arrays.queue_fill(cache, data, "engine", CYCLES)
        assert ns.store(prompt(1), regions, timeout_s=TIMEOUT_S).stored == PAGES
    assert (on_host(ns, 1) == data).all()


def test_store_without_the_time_to_wait_stores_nothing(arrays: Any, ns: kvw.OpenNamespace) -> None:
    array = arrays.array(noise(1))
    with arrays.current("engine"):
        event = arrays.queue_fill(array, noise(2), "engine", CYCLES)
        result = ns.store(prompt(1), array, timeout_s=0.01)
        assert arrays.happened(event) or (result.stored, result.dropped["timeout"]) == (0, 1)
    eventually(lambda: arrays.happened(event), "nobody writes to it any more")


def test_what_a_kernel_of_cupy_computes_is_what_is_stored(
    cupy_device: Any, serving: Serving
) -> None:
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    with serving.connect(timeout_s=TIMEOUT_S) as client, cupy_device.current("engine"):
        ns = client.open(SPACE)
        for number in (11, 12):  # the first time the kernels are compiled and loaded on the way
            cupy_device.spin(CYCLES)
            values = cupy.arange(PAGES * PAGE_BYTES, dtype=cupy.uint32) * number % 251
            pages = values.astype(cupy.uint8).reshape(PAGES, PAGE_BYTES)
            assert ns.store(prompt(number), pages, timeout_s=TIMEOUT_S).stored == PAGES
            expected = np.arange(PAGES * PAGE_BYTES, dtype=np.uint32) * np.uint32(number) % 251
            assert (on_host(ns, number).reshape(-1) == expected.astype(np.uint8)).all()
