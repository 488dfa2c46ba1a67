"""What a bench asks of a store, whichever it is, and the pages that it stores and loads. One owner,
one thread.

A page has a stamp that tells it from every other of every round: three words, its first, one in the
middle and its last, so that a page which is another one, or of another round, or came in part, is
found by reading 24 bytes of it.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

_SEED = 7
# Odd, so that multiplying permutes the words of 64 bits (2^64 over the golden ratio).
_SPREAD = 0x9E3779B97F4A7C15
_WORD_BYTES = 8
_MOST_PAGES = 1 << 20

ONLY = "as it is"
"""The way of a store that has one way alone."""


class WrongBytesError(Exception):
    """A store handed out something else than what was stored under that name."""


class StampedPages:
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

    def part(self, first: int, count: int) -> StampedPages:
        """Of the same memory."""
        window = slice(first, first + count)
        return StampedPages(self.source[window], self.target[window])

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


class CannotRunError(Exception):
    """This store cannot run here; the text says why, in one line."""


@dataclass(frozen=True)
class StoreRoom:
    """What a store is opened with."""

    folder: Path
    """On the disk that is measured; goes away with all that is in it."""
    moved_bytes: int
    """At most, in one round. A store needs room for two of them."""
    disk: bool
    """Whether what is stored has to end on the disk. Otherwise it may stay in memory."""
    options: Mapping[str, Any]
    """Of this store: where its programs are."""


class Store(Protocol):
    """Names stand for pages: what a client of this store has in its hand before it asks. Times are
    taken around store, load, found and settle; all else is not measured."""

    ways: Sequence[str]
    """In which it can be driven."""

    def about(self) -> dict[str, str]:
        """version, layout, durability, lookup, start: as the report shows them."""
        ...

    def use(self, way: str) -> None: ...

    def memory(self, page_bytes: int) -> StampedPages:
        """Noise to store, and as much to load into, where this store is quickest to take it."""
        ...

    def names(self, label: str, count: int) -> Any:
        """Of `count` pages of one prompt."""
        ...

    def store(self, names: Any, pages: StampedPages) -> None:
        """Returns once all can be loaded; raises where one cannot."""
        ...

    def load(self, names: Any, pages: StampedPages) -> int:
        """Fills the target; how many pages from the first on."""
        ...

    def ready(self, names: Any) -> None:
        """What this store needs before what it has stored is asked for. Not measured."""
        ...

    def found(self, names: Any) -> int:
        """The longest stored prefix, in pages."""
        ...

    def clear(self) -> None: ...

    def settle(self) -> None:
        """Returns once all that was stored is on the disk."""
        ...

    def drop_caches(self) -> None:
        """Leaves what was stored on the disk alone: the next load has to read it."""
        ...

    def close(self) -> None: ...


class Keyed:
    """What stores with plain keys share: memory is numpy's, names are digests."""

    ways: Sequence[str] = (ONLY,)

    def __init__(self, room: StoreRoom) -> None:
        self.room = room
        self._memory: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None

    def use(self, way: str) -> None:
        if way not in self.ways:
            raise ValueError(f"no way {way!r}")

    def memory(self, page_bytes: int) -> StampedPages:
        if self._memory is None:
            self._memory = aligned(self.room.moved_bytes), aligned(self.room.moved_bytes)
            fill(self._memory[0])
            self._memory[1][:] = 1
        return StampedPages.over(*self._memory, page_bytes)

    def names(self, label: str, count: int) -> Any:
        return [digest.digest() for digest in digests(label, count)]

    def ready(self, names: Any) -> None:
        pass

    def settle(self) -> None:
        raise CannotRunError("has no disk here")

    def drop_caches(self) -> None:
        raise CannotRunError("has no disk here")


def digests(label: str, count: int) -> list[Any]:
    return [hashlib.sha256(f"{label}/{at}".encode()) for at in range(count)]


def aligned(size_bytes: int) -> NDArray[np.uint8]:
    """Of whole memory pages, as direct I/O wants it."""
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)


def leading(flags: Sequence[object]) -> int:
    """How many are true before the first that is not."""
    for at, flag in enumerate(flags):
        if not flag:
            return at
    return len(flags)
