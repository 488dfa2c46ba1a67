"""Page buffers: shared and never copied, or refused with what was expected."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kvwarehouse.client.buffers import page_rows
from kvwarehouse.client.regions import Regions
from kvwarehouse.errors import UsageError


class Exporter:
    """Something with DLPack and nothing else, as array libraries have."""

    def __init__(self, array: np.ndarray[Any, Any], device: int = 1) -> None:
        self.array = array
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


@pytest.mark.parametrize("wrap", [lambda a: a, memoryview, Exporter])
def test_pages_share_the_memory_of_the_caller(wrap: Any) -> None:
    given = np.zeros((3, 8), np.uint8)
    rows = page_rows(wrap(given), 8, writable=False)
    assert np.shares_memory(rows, given)


def test_pages_of_a_buffer_are_writable_when_the_buffer_is() -> None:
    given = np.zeros((3, 8), np.uint8)
    page_rows(memoryview(given), 8, writable=True)[1] = 7
    assert given[1].tolist() == [7] * 8


def frozen() -> Any:
    array = np.zeros((3, 8), np.uint8)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("pages", "named"),
    [
        (np.zeros((3, 8), np.int8), "int8"),
        (np.zeros((3, 8), np.float32), "float32"),
        (np.zeros((3, 9), np.uint8), r"shape \(3, 9\)"),
        (np.zeros(24, np.uint8), r"shape \(24,\)"),
        (np.zeros((3, 1, 8), np.uint8), r"shape \(3, 1, 8\)"),
        (np.zeros((3, 16), np.uint8)[:, ::2], "strides"),
        (np.zeros((6, 8), np.uint8)[::2], "strides"),
        (np.zeros((8, 3), np.uint8).T, "strides"),
        (frozen(), "read-only"),
        (memoryview(bytes(24)).cast("B", (3, 8)), "read-only"),
        ([[0] * 8] * 3, "type list"),
        (b"x" * 24, "shape"),
        (object(), "type object"),
        (Exporter(np.zeros((3, 8), np.uint8), device=2), "device"),
    ],
)
def test_pages_of_the_wrong_kind_are_refused_by_name(pages: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        page_rows(pages, 8, writable=True)
    assert caught.value.code == "bad_pages"


def test_read_only_pages_are_taken_for_a_store() -> None:
    assert page_rows(frozen(), 8, writable=False).shape == (3, 8)


def test_row_regions_read_and_write_their_rows() -> None:
    array = np.arange(24, dtype=np.uint8).reshape(3, 8)
    regions = Regions.rows(array, writable=True)
    assert (regions.count, regions.page_bytes) == (3, 8)
    assert bytes(regions.read(1)) == bytes(range(8, 16))
    regions.write(2, memoryview(b"x" * 8))
    assert array[2].tobytes() == b"x" * 8
    assert regions.head(2).count == 2


def paged_cache() -> tuple[list[np.ndarray[Any, Any]], Any]:
    """Two layers of five blocks of four bytes; pages of two blocks each."""
    layers = [np.arange(20, dtype=np.uint8).reshape(5, 4) + 100 * n for n in range(2)]
    regions = Regions.strided(
        owners=layers,
        bases=[layer.ctypes.data for layer in layers],
        strides=[4, 4],
        piece_bytes=[4, 4],
        blocks=[[4, 0], [2, 3]],
    )
    return layers, regions


def test_strided_regions_gather_block_by_block_and_piece_by_piece() -> None:
    layers, regions = paged_cache()
    assert (regions.count, regions.page_bytes) == (2, 16)
    expected = [layers[n][block] for block in (2, 3) for n in (0, 1)]
    assert bytes(regions.read(1)) == b"".join(piece.tobytes() for piece in expected)


def test_strided_regions_scatter_what_they_gather() -> None:
    layers, regions = paged_cache()
    page = bytes(regions.read(0))
    before = [layer.copy() for layer in layers]
    for layer in layers:
        layer[:] = 0
    regions.write(0, memoryview(page))
    for layer, old in zip(layers, before, strict=True):
        assert layer[[4, 0]].tolist() == old[[4, 0]].tolist()
        assert not layer[[1, 2, 3]].any()


def test_strided_regions_keep_their_buffers_alive() -> None:
    buffer = ctypes.create_string_buffer(b"abcdefgh")
    regions = Regions.strided([buffer], [ctypes.addressof(buffer)], [4], [4], [[1]])
    del buffer
    assert bytes(regions.read(0)) == b"efgh"


@pytest.mark.parametrize(
    "arguments",
    [
        ([1, 2], [4], [4], [[0]]), ([1], [4], [4], [0]), ([1.5], [4], [4], [[0]]),
        ([], [], [], [[0]]), ([1], [4], [4], [[]]), ([1], [4], [4], [[0], [1, 2]]),
        (["x"], [4], [4], [[0]]),
    ],
)  # fmt: skip
def test_strided_regions_of_shapes_that_do_not_fit_are_refused(arguments: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Regions.strided([], *arguments)
    assert caught.value.code == "bad_regions"
