"""What every device must show of pages in its memory: run over the contract model of the driver by
tests/integration, and over a real GPU by tests/gpu. A test class inherits it and has the fixtures
`device`, `client` and `ns` (pages of 12,288 bytes, 4 tokens each).

A device has `array(data)` and `read(array)`, which wait for nothing but what they copy; `streams`,
by name, and `current(stream)`, a with statement in which arrays of this thread are computed on that
one; `queue_fill(array, data, stream)`, which queues a writing behind work that takes longer than a
store or load of these pages, and gives the event behind it; `happened(event)`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually

PAGE_BYTES = 12288
PAGE_TOKENS = 4
PAGES = 6
PIECE_BYTES = PAGE_BYTES // 3
SPACE = kvw.Namespace(
    model="gpu",
    weights="w",
    dtype="uint8",
    layout="test/1",
    page_tokens=PAGE_TOKENS,
    page_bytes=PAGE_BYTES,
)


def prompt(number: int) -> list[int]:
    return [number] * (PAGES * PAGE_TOKENS)


def noise(seed: int, pages: int = PAGES) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (pages, PAGE_BYTES), dtype=np.uint8)


def blocks_of(device: Any, cache: Any, order: list[int]) -> Any:
    """Pages of a paged cache of three layers: page p is block order[p] of each layer in turn.
    `cache` is a row a layer."""
    width = cache.shape[1]
    base = device.address(cache)
    return kvw.Regions.strided(
        [cache],
        [base + layer * width for layer in range(3)],
        [PIECE_BYTES] * 3,
        [PIECE_BYTES] * 3,
        [[block] for block in order],
    )


class DeviceSuite:
    def test_rows_on_a_device_are_stored_and_loaded(self, device: Any, ns: Any) -> None:
        data = noise(1)
        assert ns.store(prompt(1), device.array(data)).stored == PAGES
        on_host = np.zeros_like(data)
        assert ns.load(prompt(1), on_host) == PAGES
        assert (on_host == data).all()
        out = device.array(np.zeros_like(data))
        assert ns.load(prompt(1), out) == PAGES
        assert (device.read(out) == data).all()

    def test_blocks_of_a_paged_cache_are_stored_and_loaded_by_the_kernels(
        self, device: Any, ns: Any
    ) -> None:
        order = [7, 0, 3, 5, 1, 6]
        cache = device.array(np.zeros((3, 8 * PIECE_BYTES), np.uint8))
        data = noise(2)
        assert ns.store(prompt(2), data).stored == PAGES
        regions = blocks_of(device, cache, order).on_device()
        assert ns.load(prompt(2), regions) == PAGES
        held = device.read(cache).reshape(3, 8, PIECE_BYTES)
        for page, block in enumerate(order):
            assert (held[:, block].reshape(-1) == data[page]).all()
        assert not held[:, [2, 4]].any()
        assert ns.store(prompt(3), regions).stored == PAGES
        on_host = np.zeros_like(data)
        assert ns.load(prompt(3), on_host) == PAGES
        assert (on_host == data).all()

    def test_no_rows_are_no_pages_as_in_host_memory(self, device: Any, ns: Any) -> None:
        none = device.array(noise(5, pages=0))
        assert ns.load(prompt(5), none) == 0
        assert ns.store([], none).stored == 0
        other = device.array(noise(5))
        event = device.queue_fill(other, noise(6))
        assert ns.load(prompt(5), kvw.Regions.rows(none, writable=True).on_device(after=event)) == 0

    def test_load_into_rows_is_refused_when_they_are_not_writable(
        self, device: Any, ns: Any
    ) -> None:
        array = device.array(noise(4))
        rows = kvw.Regions.rows(array, writable=False)
        assert ns.store(prompt(4), rows).stored == PAGES
        with pytest.raises(kvw.UsageError, match="read-only") as refused:
            ns.load(prompt(4), rows)
        assert refused.value.code == "read_only_buffer"

    def test_store_waits_for_the_event_that_it_is_given(self, device: Any, ns: Any) -> None:
        for round_number in range(5):
            data = noise(10 + round_number)
            array = device.array(np.zeros_like(data))
            event = device.queue_fill(array, data)
            pages = kvw.Regions.rows(array, writable=False).on_device(after=event)
            assert ns.store(prompt(10 + round_number), pages).stored == PAGES
            on_host = np.zeros_like(data)
            assert ns.load(prompt(10 + round_number), on_host) == PAGES
            assert (on_host == data).all()

    def test_load_waits_for_the_event_that_it_is_given(self, device: Any, ns: Any) -> None:
        data = noise(20)
        assert ns.store(prompt(20), data).stored == PAGES
        for round_number in range(5):
            array = device.array(np.zeros_like(data))
            event = device.queue_fill(array, noise(30 + round_number))
            out = kvw.Regions.rows(array, writable=True).on_device(after=event)
            assert ns.load(prompt(20), out) == PAGES
            assert (device.read(array) == data).all()

    def test_store_waits_for_what_the_stream_of_its_array_has_queued(
        self, device: Any, ns: Any
    ) -> None:
        for number, stream in enumerate(3 * device.streams, 50):
            data = noise(number)
            array = device.array(np.zeros_like(data))
            with device.current(stream):
                device.queue_fill(array, data, stream)
                assert ns.store(prompt(number), array, timeout_s=60).stored == PAGES
            on_host = np.zeros_like(data)
            assert ns.load(prompt(number), on_host) == PAGES
            assert (on_host == data).all()

    def test_load_waits_for_what_the_stream_of_its_array_has_queued(
        self, device: Any, ns: Any
    ) -> None:
        data = noise(70)
        assert ns.store(prompt(70), data).stored == PAGES
        for number, stream in enumerate(3 * device.streams, 71):
            array = device.array(np.zeros_like(data))
            with device.current(stream):
                event = device.queue_fill(array, noise(number), stream)
                assert ns.load(prompt(70), array, timeout_s=60) == PAGES
            eventually(partial(device.happened, event), "nobody writes to it any more")
            assert (device.read(array) == data).all()

    def test_blocks_are_behind_the_stream_of_their_cache_in_each_call(
        self, device: Any, ns: Any
    ) -> None:
        """Also where the regions were made before the work was queued."""
        cache = device.array(np.zeros((3, PAGES * PIECE_BYTES), np.uint8))
        regions = blocks_of(device, cache, list(range(PAGES))).on_device()
        for number, stream in enumerate(3 * device.streams, 90):
            data = noise(number)
            layers = data.reshape(PAGES, 3, PIECE_BYTES).transpose(1, 0, 2).reshape(cache.shape)
            with device.current(stream):
                device.queue_fill(cache, np.ascontiguousarray(layers), stream)
                assert ns.store(prompt(number), regions, timeout_s=60).stored == PAGES
            on_host = np.zeros_like(data)
            assert ns.load(prompt(number), on_host) == PAGES
            assert (on_host == data).all()

    def test_load_ends_before_the_first_missing_page(self, device: Any, ns: Any) -> None:
        data = noise(40)
        half = prompt(40)[: 3 * PAGE_TOKENS]
        assert ns.store(half, device.array(data[:3])).stored == 3
        out = device.array(np.zeros_like(data))
        loaded = ns.load(prompt(40), out)
        assert (loaded, loaded.missed) == (3, {"missing": 3})
        assert (device.read(out)[:3] == data[:3]).all()

    def test_arrays_that_do_not_fit_are_refused_as_on_the_host(self, device: Any, ns: Any) -> None:
        with pytest.raises(kvw.UsageError, match=f"expected uint8 of shape .n, {PAGE_BYTES}"):
            ns.load(prompt(1), device.array(np.zeros((PAGES, 100), np.uint8)))

    def test_pages_of_a_device_are_not_read_by_the_host(self, device: Any, ns: Any) -> None:
        regions = kvw.Regions.rows(device.array(noise(1)), writable=True)
        with pytest.raises(kvw.UsageError, match="memory of a GPU"):
            regions.gather(np.zeros((PAGES, PAGE_BYTES), np.uint8))

    def test_addresses_of_the_host_are_refused(self, device: Any, ns: Any) -> None:
        host = noise(1)
        regions = kvw.Regions.strided(
            [host], [host.ctypes.data], [PAGE_BYTES], [PAGE_BYTES], [[0], [1]]
        )
        with pytest.raises(kvw.UsageError, match="not in the memory of a GPU") as refused:
            regions.on_device()
        assert refused.value.code == "bad_device_memory"
