"""Which pages were read before, and the bound of the table."""

from __future__ import annotations

import numpy as np

from kvwarehouse.gpu.nvme_reader import KnownPages


def tags(*numbers: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(numbers, np.uint64)


def test_pages_are_new_once() -> None:
    known = KnownPages(16)
    assert not known.among(tags(1, 2, 3)).any()
    known.add(tags(1, 2, 3))
    assert known.among(tags(1, 4, 3)).tolist() == [True, False, True]


def test_page_whose_place_another_one_took_is_new_again() -> None:
    known = KnownPages(16)
    known.add(tags(3))
    known.add(tags(3 + 16))
    assert known.among(tags(3, 3 + 16)).tolist() == [False, True]
