"""A client for asyncio: the twin of kvwarehouse/client/client.py, whose docstrings say what the
calls do. Used in the event loop that connected it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, TypeVar

from kvwarehouse.aio.life import Life
from kvwarehouse.aio.namespace import OpenNamespace
from kvwarehouse.aio.rpc import AsyncChannel
from kvwarehouse.client import admin
from kvwarehouse.client.admin import Named, StoredNamespace, StoredPage
from kvwarehouse.client.ends import Ends, listing, opening, refreshing
from kvwarehouse.client.flow import Flow
from kvwarehouse.client.moves import Moves
from kvwarehouse.client.rpc import Call
from kvwarehouse.client.watch import Changes, watch
from kvwarehouse.miss_ratio import MissRatio
from kvwarehouse.types import CheckProgress, Control, FlushResult, Namespace

_T = TypeVar("_T")


class Client:
    """Made by `kvwarehouse.aio.connect`; also an asynchronous context manager."""

    def __init__(self, life: Life, channel: AsyncChannel, path: Any) -> None:
        self._life = life
        self._channel = channel
        self._path = path
        self._ends = Ends(channel, path)
        self._reopened: dict[bytes, Namespace] = {}  # at a new daemon, by refresh
        self._closing: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return str(self._channel.address)

    @property
    def local(self) -> bool:
        """Whether pages move through shared memory, with pins."""
        return bool(self._path.shares_memory)

    async def open(self, space: Namespace, *, reopen: bool = True) -> OpenNamespace:
        """As kvwarehouse.Client.open."""
        await self._life.run(opening(self._ends, space))
        if reopen:
            self._reopened[space.id] = space
        return OpenNamespace(Moves(space, self._ends, reopen=reopen), self._life)

    async def refresh(self, timeout_s: float = 1.0) -> bool:
        """As kvwarehouse.Client.refresh, in a thread."""
        spaces = self._reopened
        return await self._life.run(
            refreshing(self._ends, lambda: list(spaces.values()), timeout_s)
        )

    async def control(self) -> Control:
        """As kvwarehouse.Client.control."""
        return await self._life.run(_controlling(self._ends))

    async def status(self) -> dict[str, Any]:
        """As kvwarehouse.Client.status."""
        return await self._ask(admin.status())

    async def flush(self, timeout_s: float = 30.0) -> FlushResult:
        """As kvwarehouse.Client.flush."""
        return await self._ask(admin.flush(timeout_s))

    async def clear(
        self,
        space: Named | OpenNamespace | None = None,
        *,
        all: bool = False,
        forget: bool = False,
    ) -> int:
        """As kvwarehouse.Client.clear. Cancelled, it may have been done."""
        return await self._ask(admin.clear(space, everything=all, forget=forget))

    async def evict(
        self, space: Named | OpenNamespace | None, pages: int, tiers: str = "dram"
    ) -> int:
        """As kvwarehouse.Client.evict. Cancelled, it may have been done."""
        return await self._ask(admin.evict(space, pages, tiers))

    async def drain(self, timeout_s: float = 30.0) -> FlushResult:
        """As kvwarehouse.Client.drain. Cancelled, the daemon drains all the same."""
        return await self._ask(admin.drain(timeout_s))

    async def undrain(self) -> bool:
        """As kvwarehouse.Client.undrain. Cancelled, it may have been done."""
        return await self._ask(admin.undrain())

    async def sweep(self) -> int:
        """As kvwarehouse.Client.sweep."""
        return await self._ask(admin.sweep())

    async def namespaces(self) -> list[StoredNamespace]:
        """As kvwarehouse.Client.namespaces."""
        return await self._life.run(listing(self._ends))

    async def pages(self, space: Named | OpenNamespace) -> AsyncIterator[StoredPage]:
        """As kvwarehouse.Client.pages: `async for page in client.pages(space)`."""
        after, further = -1, 0
        while further > after:
            after = further
            listed, further = await self._ask(admin.pages(space, after))
            for page in listed:
                yield page

    def watch(self, space: Named | OpenNamespace | None = None) -> AsyncIterator[Changes]:
        """As kvwarehouse.Client.watch: `async for message in client.watch()`. Cancelling the task,
        or aclose() of the iterator, ends it; closing the client too, with TransportError (code
        "cancelled")."""
        self._life.check()
        return self._channel.stream(watch(space))

    async def miss_ratio(self, space: Named | OpenNamespace | None = None) -> MissRatio:
        """As kvwarehouse.Client.miss_ratio."""
        return await self._ask(admin.miss_ratio(space))

    def check(
        self, space: Named | OpenNamespace | None = None, *, repair: bool = False
    ) -> AsyncIterator[CheckProgress]:
        """As kvwarehouse.Client.check: `async for progress in client.check()`."""
        return self._channel.stream(admin.check(space, repair=repair))

    async def close(self) -> None:
        """Ends the session: pins go. Calls under way are waited for, and all of this takes at most
        the client's timeout_s; then they fail, as watches and checks do. More than once is once,
        and nothing in a forked child. Cancelled, it goes on in the background."""
        if self._life.forked:
            return
        self._life.check_loop()
        if self._closing is None:
            self._life.closed = True
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _ask(self, call: Call[_T]) -> _T:
        return await self._life.run(_asking(self._channel, call))

    async def _close(self) -> None:
        end_s = time.monotonic() + self._channel.timeout_s
        await self._life.idle(self._channel.timeout_s)
        try:
            await self._path.close(max(0.0, end_s - time.monotonic()))
        finally:
            await self._channel.close()


def _asking(channel: AsyncChannel, call: Call[_T]) -> Flow[_T]:
    answer: _T = yield channel.ask(call)
    return answer


def _controlling(ends: Ends) -> Flow[Control]:
    page: Control = yield ends.path.control()
    return page
