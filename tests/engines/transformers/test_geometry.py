"""Page geometry without torch: the pieces of a page are where the layout says."""

from __future__ import annotations

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_connectors.core import PageGeometry, Plane, PlaneMemory

GEOMETRY = PageGeometry((Plane(2, 8), Plane(3, 4)), page_tokens=4)


def rooms(tokens: int) -> list[np.ndarray]:
    return [
        np.arange(p.heads * tokens * p.head_bytes, dtype=np.uint64)
        .astype(np.uint8)
        .reshape(p.heads, tokens, p.head_bytes)
        for p in GEOMETRY.planes
    ]


def regions(arrays: list[np.ndarray], first: int, pages: int) -> kvw.Regions:
    memory = [PlaneMemory(room.ctypes.data, room.strides[0]) for room in arrays]
    return GEOMETRY.regions(arrays, memory, first=first, pages=pages)


def test_page_has_the_bytes_of_all_planes() -> None:
    assert GEOMETRY.token_bytes == 2 * 8 + 3 * 4
    assert GEOMETRY.page_bytes == 4 * GEOMETRY.token_bytes


@pytest.mark.parametrize(("first", "pages"), [(0, 5), (2, 3), (4, 1)])
def test_page_is_plane_by_plane_and_head_by_head(first: int, pages: int) -> None:
    arrays = rooms(21)  # room behind the pages
    found = regions(arrays, first, pages)
    assert (found.count, found.page_bytes) == (pages, GEOMETRY.page_bytes)
    for page in range(pages):
        start = (first + page) * 4
        expected = b"".join(room[:, start : start + 4].tobytes() for room in arrays)
        assert bytes(found.read(page)) == expected


def test_writing_a_page_touches_no_other_byte() -> None:
    arrays = rooms(21)
    before = [room.copy() for room in arrays]
    regions(arrays, 2, 1).write(0, memoryview(bytes(GEOMETRY.page_bytes)))
    for room, old in zip(arrays, before, strict=True):
        assert not room[:, 8:12].any()
        assert np.array_equal(np.delete(room, slice(8, 12), 1), np.delete(old, slice(8, 12), 1))


@pytest.mark.parametrize(("heads", "head_bytes"), [(0, 8), (2, 0), (-1, 8)])
def test_empty_plane_is_refused(heads: int, head_bytes: int) -> None:
    with pytest.raises(kvw.UsageError, match="is not positive"):
        Plane(heads, head_bytes)


def test_missing_place_of_a_plane_is_refused() -> None:
    with pytest.raises(kvw.UsageError, match="1 places for 2 planes"):
        GEOMETRY.regions([], [PlaneMemory(0, 0)], first=0, pages=1)
