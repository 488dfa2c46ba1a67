"""Pages to store and memory to load them into, with stamps that tell every page of every round from
every other. One owner; not thread-safe.

A stamp is three words in a page: its first, one in the middle and its last, so that a page which is
another one, or of another round, or came in part, is found by reading 24 bytes of it.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

_SEED = 7
# Odd, so that multiplying permutes the words of 64 bits (2^64 over the golden ratio).
_SPREAD = 0x9E3779B97F4A7C15
_WORD_BYTES = 8
_MOST_PAGES = 1 << 20


class WrongBytesError(Exception):
    """A store handed out something else than what was stored under that name."""


class Pages:
    """source, target: uint8 (count, page_bytes), C-contiguous; page_bytes a multiple of 8."""

    def __init__(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        self.source, self.target = source, target
        self.count, self.page_bytes = source.shape

    @classmethod
    def over(cls, source: NDArray[np.uint8], target: NDArray[np.uint8], page_bytes: int) -> Self:
        """As many pages as fit into two flat pieces of memory."""
        count = len(source) // page_bytes
        cut = count * page_bytes
        return cls(source[:cut].reshape(count, -1), target[:cut].reshape(count, -1))

    def part(self, first: int, count: int) -> Pages:
        """Of the same memory."""
        window = slice(first, first + count)
        return Pages(self.source[window], self.target[window])

    def stamp(self, round_number: int) -> None:
        """Every page of the source becomes one that was never stored."""
        self._words(self.source)[:, self._places()] = self._stamps(round_number)

    def wipe(self) -> None:
        """So that what an earlier load left in the target cannot pass for this one's."""
        self._words(self.target)[:, self._places()] = 0

    def check(self, round_number: int) -> None:
        """Raises WrongBytesError for the first page of the target that is not that of the round."""
        found = self._words(self.target)[:, self._places()]
        wrong = (found != self._stamps(round_number)).any(axis=1)
        if wrong.any():
            at = int(wrong.argmax())
            raise WrongBytesError(
                f"page {at} of {self.count} is not what was stored: {int(wrong.sum())} pages have"
                " wrong stamps"
            )

    def check_whole(self) -> None:
        """Every byte of the target against the source."""
        for at in range(self.count):
            if not np.array_equal(self.source[at], self.target[at]):
                raise WrongBytesError(f"page {at} of {self.count} has bytes that were not stored")

    def _places(self) -> list[int]:
        words = self.page_bytes // _WORD_BYTES
        return [0, words // 2, words - 1]

    def _words(self, pages: NDArray[np.uint8]) -> NDArray[np.uint64]:
        return pages.view(np.uint64)

    def _stamps(self, round_number: int) -> NDArray[np.uint64]:
        """(count, 3), none twice in a run."""
        pages = np.arange(self.count, dtype=np.uint64) + np.uint64(round_number * _MOST_PAGES + 1)
        places = np.arange(3, dtype=np.uint64)
        return (pages[:, None] * np.uint64(4) + places) * np.uint64(_SPREAD)


def fill(memory: NDArray[Any]) -> None:
    """The same noise in every process, which nothing can compress."""
    words = memory.view(np.uint64)
    words[:] = np.random.default_rng(_SEED).integers(0, 2**64, len(words), dtype=np.uint64)
