"""How pages move between the warehouse and a cache's rooms.

On the CPU a page's pieces lie in the rooms already, so the client copies straight between them and
shared memory. On any other device they go through a bounded buffer in host memory.

Rooms are those of RoomyCache.rooms. Thread-safe for distinct rooms. Errors of the warehouse pass
through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.common import PageGeometry
from kvwarehouse_connectors.transformers.room import plane_memory

STAGING_BYTES = 64 << 20


@dataclass(frozen=True)
class Stored:
    """Pages of one store, by what became of them."""

    stored: int = 0
    already: int = 0
    dropped: int = 0

    def __add__(self, other: Stored) -> Stored:
        return Stored(
            self.stored + other.stored,
            self.already + other.already,
            self.dropped + other.dropped,
        )


class Transfer(Protocol):
    def load(
        self, space: kvw.OpenNamespace, tokens: Any, rooms: Sequence[Any], timeout_s: float
    ) -> int:
        """Fills the rooms with the pages of `tokens`, from the first on; returns how many are
        there. Rooms hold nothing of meaning behind them."""
        ...

    def store(
        self,
        space: kvw.OpenNamespace,
        tokens: Any,
        rooms: Sequence[Any],
        first: int,
        timeout_s: float,
    ) -> Stored:
        """Stores the pages of `tokens` from page `first` on. Reads the rooms until it returns."""
        ...


def transfer_for(device: torch.device, geometry: PageGeometry) -> Transfer:
    return DirectTransfer(geometry) if device.type == "cpu" else StagedTransfer(geometry)


class DirectTransfer:
    """Between shared memory and rooms in host memory, in one copy."""

    def __init__(self, geometry: PageGeometry) -> None:
        self._geometry = geometry

    def load(
        self, space: kvw.OpenNamespace, tokens: Any, rooms: Sequence[Any], timeout_s: float
    ) -> int:
        regions = self._regions(rooms, 0, len(tokens))
        return int(space.load(tokens, regions, timeout_s=timeout_s))

    def store(
        self,
        space: kvw.OpenNamespace,
        tokens: Any,
        rooms: Sequence[Any],
        first: int,
        timeout_s: float,
    ) -> Stored:
        regions = self._regions(rooms, first, len(tokens))
        return _counted(space.store(tokens, regions, first=first, timeout_s=timeout_s))

    def _regions(self, rooms: Sequence[Any], first: int, tokens: int) -> kvw.Regions:
        pages = tokens // self._geometry.page_tokens - first
        memory = [plane_memory(room) for room in rooms]
        return self._geometry.regions(rooms, memory, first=first, pages=pages)


class StagedTransfer:
    """Through a buffer of at most staging_bytes (one page, where that is larger)."""

    def __init__(self, geometry: PageGeometry, staging_bytes: int = STAGING_BYTES) -> None:
        self._geometry = geometry
        self._batch = max(1, staging_bytes // geometry.page_bytes)

    def load(
        self, space: kvw.OpenNamespace, tokens: Any, rooms: Sequence[Any], timeout_s: float
    ) -> int:
        loaded = 0
        for first, pages, buffer in self._batches(0, tokens):
            filled = int(space.load(tokens, buffer, first=first, timeout_s=timeout_s))
            for inside, page in self._pieces(buffer[:filled], rooms, first):
                inside.copy_(page)
            loaded += filled
            if filled < pages:
                break
        return loaded

    def store(
        self,
        space: kvw.OpenNamespace,
        tokens: Any,
        rooms: Sequence[Any],
        first: int,
        timeout_s: float,
    ) -> Stored:
        if rooms[0].device.type != "cpu":
            # This may be another thread, with another stream, than the one that computed them.
            torch.accelerator.synchronize(rooms[0].device)
        total = Stored()
        for start, pages, buffer in self._batches(first, tokens):
            for inside, page in self._pieces(buffer, rooms, start):
                page.copy_(inside)
            upto = tokens[: (start + pages) * self._geometry.page_tokens]
            total += _counted(space.store(upto, buffer, first=start, timeout_s=timeout_s))
        return total

    def _batches(self, first: int, tokens: Any) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
        """(first page, pages, buffer for them). The buffer is used again."""
        end = len(tokens) // self._geometry.page_tokens
        buffer = np.empty((min(self._batch, end - first), self._geometry.page_bytes), np.uint8)
        for start in range(first, end, self._batch):
            pages = min(self._batch, end - start)
            yield start, pages, buffer[:pages]

    def _pieces(
        self, buffer: NDArray[np.uint8], rooms: Sequence[Any], first: int
    ) -> Iterator[tuple[Any, Any]]:
        """Plane by plane, the same tokens in the room and in the buffer's pages, as tensors
        [pages, heads, page_tokens, size] that share their memory."""
        pages, page_tokens = len(buffer), self._geometry.page_tokens
        offset = 0
        for plane, room in zip(self._geometry.planes, rooms, strict=True):
            size_bytes = plane.token_bytes * page_tokens
            part = torch.from_numpy(buffer[:, offset : offset + size_bytes]).view(room.dtype)
            page = part.unflatten(1, (plane.heads, page_tokens, room.shape[3]))
            inside = room[0, :, first * page_tokens : (first + pages) * page_tokens]
            yield inside.unflatten(1, (pages, page_tokens)).transpose(0, 1), page
            offset += size_bytes


def _counted(result: kvw.StoreResult) -> Stored:
    return Stored(result.stored, result.already, result.dropped_pages)
