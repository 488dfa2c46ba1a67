"""Threads for what copies or may wait, so that the event loop does neither.

At most THREADS calls run at a time; the others wait in the loop, within their own time, and are
not begun before there is room: a call that is cancelled or late by then never was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from kvwarehouse.client.endpoint import closed

_T = TypeVar("_T")

THREADS: Final = 8
"""Enough to keep memory busy while some wait for a disk; memory is the limit long before."""


class Threads:
    def __init__(self) -> None:
        # One more, so that closing never waits for room.
        self._pool = ThreadPoolExecutor(THREADS + 1, thread_name_prefix="kvwarehouse-aio")
        self._room = asyncio.Semaphore(THREADS)
        self._closed = False

    async def run(
        self,
        work: Callable[[], _T],
        wait_s: float,
        *,
        late: Callable[[], _T],
        undo: Callable[[_T], object] | None = None,
    ) -> _T:
        """What `work` returns; what `late` does where no thread came free within wait_s. Raises
        UsageError (code "closed") where this was closed before one did.

        Work that has begun is not left alone: cancelled meanwhile, this waits for its end, undoes
        what it returned, and is cancelled then."""
        try:
            async with asyncio.timeout(wait_s):
                await self._room.acquire()
        except TimeoutError:
            return late()
        try:
            if self._closed:
                raise closed()
            return await self._ended(work, undo)
        finally:
            self._room.release()

    async def begin(self, work: Callable[[], _T], *, undo: Callable[[_T], object]) -> _T:
        """The first work, when all threads are free."""
        return await self._ended(work, undo)

    def end(self) -> None:
        """For good, where `close` is not called."""
        self._pool.shutdown(wait=False)

    async def close(self, last: Callable[[], None], timeout_s: float) -> None:
        """Runs `last`, and waits for it at most timeout_s. Calls that wait for a thread fail at
        once; threads that still work end by themselves."""
        self._closed = True
        self._room.release()  # each call that wakes by it passes it on
        future = asyncio.get_running_loop().run_in_executor(self._pool, last)
        self._pool.shutdown(wait=False)
        await asyncio.wait((future,), timeout=timeout_s)
        if future.done():
            future.result()

    async def _ended(self, work: Callable[[], _T], undo: Callable[[_T], object] | None) -> _T:
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait((future,))  # which leaves the future alone when it is cancelled
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is None:
            return future.result()
        if future.exception() is None and undo is not None:
            undo(future.result())
        raise cancelled
