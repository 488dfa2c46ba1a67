"""How pages move between the warehouse and a cache's rooms.

A page's pieces lie in the rooms already, so the client copies straight between them and shared
memory: on the CPU, and on a GPU, where docs/gpu.md says how. On any other device, or where that way
is not there, they go through a bounded buffer in host memory.

Rooms are those of RoomyCache.rooms. Thread-safe for distinct rooms. Errors of the warehouse pass
through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core import PageGeometry
from kvwarehouse_connectors.core.device_copies import (
    DeviceCopies,
    EngineStream,
    device_copies,
    keep,
    may_still_write,
)
from kvwarehouse_connectors.core.torch_stream import TorchStream
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

    def computed(self, rooms: Sequence[Any]) -> Any:
        """What a store of these rooms in another thread has to wait for: all that the computing
        thread, which calls this, has queued on their device. None in host memory."""
        ...

    def store(
        self,
        space: kvw.OpenNamespace,
        tokens: Any,
        rooms: Sequence[Any],
        first: int,
        timeout_s: float,
        after: Any = None,
    ) -> Stored:
        """Stores the pages of `tokens` from page `first` on. Reads the rooms until it returns.
        after: of `computed`."""
        ...

    def close(self) -> None:
        """When no load is made any more. Waits for nothing."""
        ...


def transfer_for(
    device: torch.device,
    geometry: PageGeometry,
    wish: str,
    on_fallback: Callable[[], None],
    client: kvw.Client | None = None,
) -> Transfer:
    """wish, on_fallback, client: as device_copies.py has them. Blocks for a second on a GPU."""
    if device.type == "cpu":
        return DirectTransfer(geometry)
    staged, stream = StagedTransfer(geometry), TorchStream(device)
    address = torch.empty(1, device=device).data_ptr()
    copies = device_copies(stream, address, wish, on_fallback, client)
    return staged if copies is None else DeviceTransfer(geometry, staged, copies, stream)


class DirectTransfer:
    """Between shared memory and rooms in host memory, in one copy."""

    def __init__(self, geometry: PageGeometry) -> None:
        self._geometry = geometry

    def load(
        self, space: kvw.OpenNamespace, tokens: Any, rooms: Sequence[Any], timeout_s: float
    ) -> int:
        regions = _regions(self._geometry, rooms, 0, len(tokens))
        return int(space.load(tokens, regions, timeout_s=timeout_s))

    def computed(self, rooms: Sequence[Any]) -> Any:
        return None

    def store(
        self,
        space: kvw.OpenNamespace,
        tokens: Any,
        rooms: Sequence[Any],
        first: int,
        timeout_s: float,
        after: Any = None,
    ) -> Stored:
        regions = _regions(self._geometry, rooms, first, len(tokens))
        return _counted(space.store(tokens, regions, first=first, timeout_s=timeout_s))

    def close(self) -> None:
        return None


class DeviceTransfer:
    """Between shared memory and rooms on a GPU, straight, and through `staged` where the device
    refuses that. Rooms of a load that a hanging device may still write to are never freed."""

    def __init__(
        self,
        geometry: PageGeometry,
        staged: Transfer,
        copies: DeviceCopies,
        stream: EngineStream,
    ) -> None:
        self._geometry = geometry
        self._staged = staged
        self._copies = copies
        self._stream = stream

    def load(
        self, space: kvw.OpenNamespace, tokens: Any, rooms: Sequence[Any], timeout_s: float
    ) -> int:
        if self._copies.usable:
            try:
                # Their memory may be what the stream still works on for somebody else.
                pages = self._placed(rooms, 0, len(tokens), self._stream.recorded())
                return int(self._copies.load(space, tokens, pages, timeout_s=timeout_s))
            except kvw.WarehouseError as error:
                if may_still_write(error):
                    keep(rooms)
                if not self._copies.refused(error):
                    raise
        return self._staged.load(space, tokens, rooms, timeout_s)

    def computed(self, rooms: Sequence[Any]) -> Any:
        return self._stream.recorded() if self._copies.usable else self._staged.computed(rooms)

    def store(
        self,
        space: kvw.OpenNamespace,
        tokens: Any,
        rooms: Sequence[Any],
        first: int,
        timeout_s: float,
        after: Any = None,
    ) -> Stored:
        if self._copies.usable:
            try:
                # Held rooms are not written again: nothing has to be copied before.
                pages = self._placed(rooms, first, len(tokens), after)
                return _counted(space.store(tokens, pages, first=first, timeout_s=timeout_s))
            except kvw.WarehouseError as error:
                if not self._copies.refused(error):
                    raise
        return self._staged.store(space, tokens, rooms, first, timeout_s, after)

    def close(self) -> None:
        self._copies.close()

    def _placed(self, rooms: Sequence[Any], first: int, tokens: int, after: Any) -> kvw.Regions:
        return self._copies.placed(_regions(self._geometry, rooms, first, tokens), after)


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

    def computed(self, rooms: Sequence[Any]) -> Any:
        device = rooms[0].device
        if device.type == "cpu":
            return None
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        return event

    def store(
        self,
        space: kvw.OpenNamespace,
        tokens: Any,
        rooms: Sequence[Any],
        first: int,
        timeout_s: float,
        after: Any = None,
    ) -> Stored:
        if after is not None:
            # This may be another thread, with another stream, than the one that computed them.
            after.synchronize()
        total = Stored()
        for start, pages, buffer in self._batches(first, tokens):
            for inside, page in self._pieces(buffer, rooms, start):
                page.copy_(inside)
            upto = tokens[: (start + pages) * self._geometry.page_tokens]
            total += _counted(space.store(upto, buffer, first=start, timeout_s=timeout_s))
        return total

    def close(self) -> None:
        return None

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


def _regions(geometry: PageGeometry, rooms: Sequence[Any], first: int, tokens: int) -> kvw.Regions:
    """Pages of the rooms from page `first` to the last whole one of so many tokens."""
    pages = tokens // geometry.page_tokens - first
    memory = [plane_memory(room) for room in rooms]
    return geometry.regions(rooms, memory, first=first, pages=pages)


def _counted(result: kvw.StoreResult) -> Stored:
    return Stored(result.stored, result.already, result.dropped_pages)
