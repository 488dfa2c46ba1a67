"""The seam between the surface of the asyncio client and how pages move: the twin of
kvwarehouse/client/transport.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvwarehouse.client.requests import (
    LoadRequest,
    LookupRequest,
    ReleaseRequest,
    StoreRequest,
)
from kvwarehouse.types import Loaded, Match, Namespace, StoreResult

if TYPE_CHECKING:
    from kvwarehouse.aio.shared_memory import AsyncSharedMemory


class AsyncTransport(Protocol):
    """As kvwarehouse.client.transport.Transport, used in one event loop."""

    patient: bool

    @property
    def shared_memory(self) -> AsyncSharedMemory | None: ...

    async def has_namespace(self, space: Namespace) -> bool: ...

    async def lookup(self, request: LookupRequest) -> Match: ...

    async def load(self, request: LoadRequest) -> Loaded: ...

    async def store(self, request: StoreRequest) -> StoreResult: ...

    async def release(self, request: ReleaseRequest) -> int: ...

    async def close(self, timeout_s: float) -> None: ...
