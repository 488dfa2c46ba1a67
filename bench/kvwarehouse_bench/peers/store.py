"""What a bench asks of a store, whichever it is. One owner, one thread."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvwarehouse_bench.peers.pages import Pages, fill

ONLY = "as it is"
"""The way of a store that has one way alone."""


class CannotRunError(Exception):
    """This store cannot run here; the text says why, in one line."""


@dataclass(frozen=True)
class Room:
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

    def memory(self, page_bytes: int) -> Pages:
        """Noise to store, and as much to load into, where this store is quickest to take it."""
        ...

    def names(self, label: str, count: int) -> Any:
        """Of `count` pages of one prompt."""
        ...

    def store(self, names: Any, pages: Pages) -> None:
        """Returns once all can be loaded; raises where one cannot."""
        ...

    def load(self, names: Any, pages: Pages) -> int:
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

    def __init__(self, room: Room) -> None:
        self.room = room
        self._memory: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None

    def use(self, way: str) -> None:
        if way not in self.ways:
            raise ValueError(f"no way {way!r}")

    def memory(self, page_bytes: int) -> Pages:
        if self._memory is None:
            self._memory = aligned(self.room.moved_bytes), aligned(self.room.moved_bytes)
            fill(self._memory[0])
            self._memory[1][:] = 1
        return Pages.over(*self._memory, page_bytes)

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
