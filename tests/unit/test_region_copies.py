"""Copies between pages where they lie and rows of one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvwarehouse import Regions, UsageError

pytest.importorskip("kvwarehouse.core._native", reason="the core is not built")


def strided(layers: list[Any], pieces: list[int], blocks: Any) -> Regions:
    bases = [layer.ctypes.data for layer in layers]
    strides = [layer.strides[0] for layer in layers]
    return Regions.strided(layers, bases, strides, pieces, blocks)


@pytest.mark.parametrize("pieces", [[64, 64], [1, 63], [4096, 100], [700, 1029], [5000, 9000]])
def test_rows_are_what_lies_in_the_blocks_and_go_back_there(pieces: list[int], seed: int) -> None:
    noise = np.random.default_rng(seed)
    layers = [noise.integers(0, 256, (40, piece + 24), dtype=np.uint8) for piece in pieces]
    before = [layer.copy() for layer in layers]
    blocks = noise.permutation(40)[:24].reshape(8, 3)
    regions = strided(layers, pieces, blocks)
    rows = np.zeros((8, regions.page_bytes), np.uint8)
    regions.gather(rows)
    for row, page in zip(rows, blocks, strict=True):
        parts = [
            layer[block, :piece]
            for block in page
            for layer, piece in zip(before, pieces, strict=True)
        ]
        assert np.array_equal(row, np.concatenate(parts))
    other = noise.integers(0, 256, rows.shape, dtype=np.uint8)
    regions.scatter(other)
    regions.gather(rows)
    assert np.array_equal(rows, other)
    regions.scatter(np.zeros_like(rows))
    for layer, old, piece in zip(layers, before, pieces, strict=True):
        assert np.array_equal(layer[:, piece:], old[:, piece:])  # what lies between the pieces
        unused = np.setdiff1d(np.arange(40), blocks)
        assert np.array_equal(layer[unused], old[unused])
        assert not layer[blocks, :piece].any()


def test_rows_are_copied_from_rows(seed: int) -> None:
    pages = np.random.default_rng(seed).integers(0, 256, (5, 3001), dtype=np.uint8)
    out = np.zeros_like(pages)
    Regions.rows(pages, writable=False).gather(out)
    assert np.array_equal(out, pages)
    Regions.rows(out, writable=True).scatter(pages[::-1].copy())
    assert np.array_equal(out, pages[::-1])


def test_regions_without_a_page_copy_nothing() -> None:
    regions = strided([np.zeros((1, 8), np.uint8)], [8], np.zeros((0, 1), np.int64))
    regions.gather(np.zeros((0, 8), np.uint8))
    regions.scatter(np.zeros((0, 8), np.uint8))


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((3, 8), np.uint8), np.zeros((2, 9), np.uint8), np.zeros(16, np.uint8),
        np.zeros((2, 8), np.int8), np.zeros((2, 16), np.uint8)[:, ::2], np.zeros((4, 8))[::2], None,
    ],
)  # fmt: skip
def test_rows_of_another_shape_are_refused(rows: Any) -> None:
    regions = strided([np.zeros((4, 8), np.uint8)], [8], [[0], [1]])
    for copy in (regions.gather, regions.scatter):
        with pytest.raises(UsageError) as caught:
            copy(rows)
        assert caught.value.code == "bad_pages"


def test_memory_that_may_not_be_written_is_refused() -> None:
    rows = np.zeros((2, 8), np.uint8)
    rows.flags.writeable = False
    with pytest.raises(UsageError, match="read-only") as caught:
        Regions.rows(np.zeros((2, 8), np.uint8), writable=False).gather(rows)
    assert caught.value.code == "bad_pages"
    with pytest.raises(UsageError, match="read-only") as caught:
        Regions.rows(rows, writable=False).scatter(np.zeros((2, 8), np.uint8))
    assert caught.value.code == "bad_buffer"
