"""The transport of a client on the daemon's host, for asyncio: shared memory, in the loop where it
takes microseconds, in a thread where it copies or may wait.

Used in one event loop; the memory's blocking client beneath is thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.aio.threads import THREADS, Threads
from kvwarehouse.aio.transport import AsyncTransport
from kvwarehouse.client.pins import Pins
from kvwarehouse.client.prompt import Prefix
from kvwarehouse.client.requests import (
    LoadRequest,
    LookupRequest,
    PinRequest,
    ReleaseRequest,
    StoreRequest,
    TiersRequest,
)
from kvwarehouse.client.shared_memory import SharedMemory
from kvwarehouse.errors import TransportError
from kvwarehouse.types import Control, Loaded, Match, Namespace, StoreResult

_T = TypeVar("_T")

INLINE_PAGES: Final = 4096
"""A lookup of more pages goes to a thread: at about 45 ns a page, with hashing, it is 0.2 ms."""

INLINE_PATIENCE_S: Final = 0.02
"""So does any of a client whose reads may spend longer on the hello of a daemon that was replaced.
It is what they may spend by default, at most once a second where nobody answers."""


class AsyncSharedMemory(AsyncTransport):
    def __init__(self, memory: SharedMemory, patience_s: float | None, threads: Threads) -> None:
        self._memory = memory
        self._threads = threads
        self._timeout_s = memory.timeout_s
        self._quick = patience_s is None or patience_s <= INLINE_PATIENCE_S
        self.patient = memory.patient

    @property
    def shared_memory(self) -> AsyncSharedMemory:
        return self

    async def has_namespace(self, space: Namespace) -> bool:
        return await self._run(partial(self._memory.has_namespace, space), self._timeout_s)

    async def lookup(self, request: LookupRequest) -> Match:
        if self._inline(request.prefix):
            return self._memory.lookup(request)
        return await self._run(partial(self._memory.lookup, request), self._timeout_s)

    async def load(self, request: LoadRequest) -> Loaded:
        return await self._within(
            lambda left_s: self._memory.load(request._replace(timeout_s=left_s)),
            request.timeout_s,
            late=lambda: request.missed("timeout"),
        )

    async def store(self, request: StoreRequest) -> StoreResult:
        return await self._within(
            lambda left_s: self._memory.store(request._replace(timeout_s=left_s)),
            request.timeout_s,
        )

    async def release(self, request: ReleaseRequest) -> int:
        if self._inline(request.prefix):
            return self._memory.release(request)
        return await self._run(partial(self._memory.release, request), self._timeout_s)

    def sees_namespace(self, space: Namespace) -> bool:
        return self._memory.sees_namespace(space)

    async def refresh(self, timeout_s: float) -> bool:
        return await self._within(self._memory.refresh, timeout_s, late=lambda: False)

    def control(self) -> Control:
        return self._memory.control()

    async def tiers(self, request: TiersRequest) -> NDArray[np.uint8]:
        if self._inline(request.prefix):
            return self._memory.tiers(request)
        return await self._run(partial(self._memory.tiers, request), self._timeout_s)

    async def pin(self, request: PinRequest) -> Pins:
        if not request.timeout_s and self._inline(request.prefix):
            return self._memory.pin(request)
        return await self._within(
            lambda left_s: self._memory.pin(request._replace(timeout_s=left_s)),
            request.timeout_s,
            late=request.missed,
            undo=Pins.release,
        )

    async def close(self, timeout_s: float) -> None:
        await self._threads.close(self._memory.close, timeout_s)

    def _inline(self, prefix: Prefix) -> bool:
        return self._quick and prefix.pages <= INLINE_PAGES

    async def _within(
        self,
        move: Callable[[float], _T],
        timeout_s: float,
        *,
        late: Callable[[], _T] | None = None,
        undo: Callable[[_T], object] | None = None,
    ) -> _T:
        """`move` with what is left of its time once a thread takes it. Of no time at all nothing is
        taken away: it means not to wait for a disk, and says nothing about threads."""
        end_s = time.monotonic() + timeout_s

        def work() -> _T:
            return move(max(0.0, end_s - time.monotonic()))

        return await self._run(work, timeout_s or self._timeout_s, late=late, undo=undo)

    async def _run(
        self,
        work: Callable[[], _T],
        wait_s: float,
        *,
        late: Callable[[], _T] | None = None,
        undo: Callable[[_T], object] | None = None,
    ) -> _T:
        return await self._threads.run(work, wait_s, late=late or _no_thread, undo=undo)


def _no_thread() -> NoReturn:
    raise TransportError(
        f"all {THREADS} threads of this client were busy for the whole time of the call; give it"
        " more, or make fewer calls at once",
        code="deadline",
    )
