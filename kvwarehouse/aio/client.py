"""A client for asyncio: the twin of kvwarehouse/client/client.py, whose docstrings say what the
calls do. Used in the event loop that connected it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, TypeVar

from kvwarehouse.aio.life import Life
from kvwarehouse.aio.namespace import OpenNamespace, open_namespace
from kvwarehouse.aio.rpc import AsyncChannel
from kvwarehouse.aio.transport import AsyncTransport
from kvwarehouse.client import admin
from kvwarehouse.client.admin import Named, StoredNamespace, StoredPage
from kvwarehouse.client.endpoint import checked_timeout
from kvwarehouse.client.keeps import Keep, ListedKeeps, keep, keeps, remove_all_keeps, remove_keep
from kvwarehouse.client.namespace import ReopenedNamespaces
from kvwarehouse.client.prompt import Keys
from kvwarehouse.client.rpc import Call
from kvwarehouse.client.transport import no_control, no_refresh
from kvwarehouse.client.watch import Changes, watch
from kvwarehouse.client.why import (
    NotedRequest,
    WhyAnswer,
    note_requests,
    requests,
    why,
)
from kvwarehouse.errors import TransportError, WarehouseError
from kvwarehouse.miss_ratio import MissRatio
from kvwarehouse.types import (
    CheckProgress,
    ClearedPages,
    Control,
    FlushResult,
    Namespace,
    RequestNote,
)

_A = TypeVar("_A")
_T = TypeVar("_T")


class Client:
    """Made by `kvwarehouse.aio.connect`; also an asynchronous context manager."""

    def __init__(self, life: Life, channel: AsyncChannel, transport: AsyncTransport) -> None:
        self._life = life
        self._channel = channel
        self._transport = transport
        self._reopened = ReopenedNamespaces()
        self._closing: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return str(self._channel.address)

    @property
    def local(self) -> bool:
        """Whether pages move through shared memory, with pins."""
        return self._transport.shared_memory is not None

    async def open(self, space: Namespace, *, reopen: bool = True) -> OpenNamespace:
        """As kvwarehouse.Client.open."""
        with self._life:
            await open_namespace(self._channel, self._transport, space)
        opened = OpenNamespace(space, self._life, self._channel, self._transport, reopen=reopen)
        if reopen:
            self._reopened.add(opened)
        return opened

    async def refresh(self, timeout_s: float = 1.0) -> bool:
        """As kvwarehouse.Client.refresh, in a thread."""
        with self._life:
            timeout_s = checked_timeout(timeout_s)
            memory = self._transport.shared_memory
            if memory is None:
                raise no_refresh(self._channel.address)
            end_s = time.monotonic() + timeout_s
            if not await memory.refresh(timeout_s):
                return False
            address = self._channel.address
            refused: WarehouseError | None = None
            for space in self._reopened.spaces():
                if memory.sees_namespace(space):
                    continue
                left_s = max(0.0, end_s - time.monotonic())
                try:
                    await self._channel.ask(admin.open_namespace(space, address, left_s))
                except TransportError:
                    return False
                except WarehouseError as error:
                    refused = refused or error
            if refused is not None:
                raise refused
            return True

    async def control(self) -> Control:
        """As kvwarehouse.Client.control."""
        with self._life:
            memory = self._transport.shared_memory
            if memory is None:
                raise no_control(self._channel.address)
            return memory.control()

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
    ) -> ClearedPages:
        """As kvwarehouse.Client.clear. Cancelled, it may have been done."""
        cleared = await self._ask(admin.clear(space, everything=all, forget=forget))
        if forget:
            self._reopened.forget(space)
        return cleared

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
        known: list[StoredNamespace] = []
        after, further = -1, 0
        with self._life:
            while further > after:
                after = further
                listed, further = await self._channel.ask(admin.namespaces(after))
                known += listed
        return known

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

    async def why(
        self,
        tokens: Any = None,
        *,
        keys: Sequence[bytes] | None = None,
        space: Named | OpenNamespace | None = None,
        model: str = "",
        with_tokens: bool = False,
    ) -> WhyAnswer:
        """As kvwarehouse.Client.why."""
        return await self._ask(why(tokens, keys, space, model, with_tokens=with_tokens))

    async def keep(
        self,
        space: Named | OpenNamespace,
        tokens: Any = None,
        *,
        ttl_s: float,
        keys: Keys | None = None,
        name: str = "",
        renewed: bool = False,
    ) -> Keep:
        """As kvwarehouse.Client.keep."""
        call = keep(space, tokens, keys, ttl_s=ttl_s, name=name, renewed=renewed)
        return await self._ask(call)

    async def keeps(self) -> ListedKeeps:
        """As kvwarehouse.Client.keeps."""
        return await self._ask(keeps())

    async def remove_keep(self, name: str, space: Named | OpenNamespace | None = None) -> int:
        """As kvwarehouse.Client.remove_keep."""
        return await self._ask(remove_keep(name, space))

    async def remove_all_keeps(self, space: Named | OpenNamespace | None = None) -> int:
        """As kvwarehouse.Client.remove_all_keeps."""
        return await self._ask(remove_all_keeps(space))

    async def note_requests(self, notes: Sequence[RequestNote]) -> None:
        """As kvwarehouse.Client.note_requests."""
        await self._ask(note_requests(notes))

    async def requests(self, request_id: str = "", *, limit: int = 1000) -> list[NotedRequest]:
        """As kvwarehouse.Client.requests."""
        return await self._ask(requests(request_id, limit))

    def check(
        self, space: Named | OpenNamespace | None = None, *, repair: bool = False
    ) -> AsyncIterator[CheckProgress]:
        """As kvwarehouse.Client.check: `async for progress in client.check()`."""
        return self._channel.stream(admin.check(space, repair=repair))

    async def close(self) -> None:
        """Ends the client. Pins that somebody still holds stay until they are released. Calls under
        way are waited for, and all of this takes at most the client's timeout_s; then they fail, as
        watches and checks do. More than once is once, and nothing in a forked child. Cancelled, it
        goes on in the background."""
        if self._life.forked:
            return
        self._life.check_loop()
        if self._closing is None:
            self._life.closed = True
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _ask(self, call: Call[_A, _T]) -> _T:
        with self._life:
            return await self._channel.ask(call)

    async def _close(self) -> None:
        end_s = time.monotonic() + self._channel.timeout_s
        await self._life.idle(self._channel.timeout_s)
        try:
            await self._transport.close(max(0.0, end_s - time.monotonic()))
        finally:
            await self._channel.close()
