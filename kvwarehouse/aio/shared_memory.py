"""The data path of a client on the daemon's host, for asyncio: shared memory, in the loop where it
takes microseconds, in a thread where it copies or may wait.

Used in one event loop; the path beneath is thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.aio.threads import THREADS, Threads
from kvwarehouse.client.grpc_transport import Loading, Storing
from kvwarehouse.client.pins import NoPins
from kvwarehouse.client.prompt import Prefix, Window
from kvwarehouse.client.regions import Regions
from kvwarehouse.client.shared_memory import SharedMemory
from kvwarehouse.client.transport import Pinned
from kvwarehouse.errors import TransportError
from kvwarehouse.types import Control, Namespace

_T = TypeVar("_T")

INLINE_PAGES: Final = 4096
"""A lookup of more pages goes to a thread: at about 45 ns a page, with hashing, it is 0.2 ms."""

INLINE_PATIENCE_S: Final = 0.02
"""So does any of a client whose reads may spend longer on the hello of a daemon that was replaced.
It is what they may spend by default, at most once a second where nobody answers."""


class AsyncSharedMemory:
    shares_memory = True

    def __init__(self, path: SharedMemory, patience_s: float | None, threads: Threads) -> None:
        self._path = path
        self._threads = threads
        self._timeout_s = path.timeout_s
        self._quick = patience_s is None or patience_s <= INLINE_PATIENCE_S
        self.patient = path.patient

    async def opened(self, space: Namespace) -> bool:
        return await self._run(partial(self._path.opened, space), self._timeout_s)

    def sees(self, space: Namespace) -> bool:
        return self._path.sees(space)

    async def refresh(self, timeout_s: float) -> bool:
        return await self._within(self._path.refresh, timeout_s, late=lambda: False)

    async def control(self) -> Control:
        return self._path.control()

    async def lookup(self, space: Namespace, prefix: Prefix) -> tuple[int, int, int]:
        if self._inline(prefix):
            return self._path.lookup(space, prefix)
        return await self._run(partial(self._path.lookup, space, prefix), self._timeout_s)

    async def tiers(self, space: Namespace, prefix: Prefix, *, counted: bool) -> NDArray[np.uint8]:
        read = partial(self._path.tiers, space, prefix, counted=counted)
        return read() if self._inline(prefix) else await self._run(read, self._timeout_s)

    async def load(
        self, space: Namespace, prefix: Prefix, window: Window, out: Regions, timeout_s: float
    ) -> Loading:
        return await self._within(
            partial(self._path.load, space, prefix, window, out),
            timeout_s,
            late=lambda: (0, {"timeout": window.pages}),
        )

    async def store(
        self, space: Namespace, prefix: Prefix, window: Window, pages: Regions, timeout_s: float
    ) -> Storing:
        return await self._within(
            partial(self._path.store, space, prefix, window, pages), timeout_s
        )

    async def pin(self, space: Namespace, prefix: Prefix, first: int, timeout_s: float) -> Pinned:
        if not timeout_s and self._inline(prefix):
            return self._path.pin(space, prefix, first, timeout_s)
        return await self._within(
            partial(self._path.pin, space, prefix, first),
            timeout_s,
            late=NoPins,
            undo=lambda pinned: pinned.release(),
        )

    async def close(self, timeout_s: float) -> None:
        await self._threads.close(self._path.close, timeout_s)

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
