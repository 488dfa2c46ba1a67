"""Which pages were read before, and the bound of the table."""

from __future__ import annotations

import numpy as np

from kvwarehouse.gpu.nvme_reader import RecentPages


def tags(*numbers: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(numbers, np.uint64)


def test_pages_are_new_once() -> None:
    recent = RecentPages(16)
    assert not recent.among(tags(1, 2, 3)).any()
    recent.add(tags(1, 2, 3))
    assert recent.among(tags(1, 4, 3)).tolist() == [True, False, True]


def test_page_whose_place_another_one_took_is_new_again() -> None:
    recent = RecentPages(16)
    recent.add(tags(3))
    recent.add(tags(3 + 16))
    assert recent.among(tags(3, 3 + 16)).tolist() == [False, True]
