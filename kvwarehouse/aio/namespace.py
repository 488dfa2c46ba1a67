"""A namespace opened at a daemon, for asyncio: the twin of kvwarehouse/client/namespace.py.

Used in the event loop that connected the client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.aio.life import Life
from kvwarehouse.aio.rpc import AsyncChannel
from kvwarehouse.aio.transport import AsyncTransport
from kvwarehouse.client import admin
from kvwarehouse.client.namespace import UNKNOWN_NAMESPACE, check_namespace
from kvwarehouse.client.pins import Pins
from kvwarehouse.client.prompt import Keys, prefix_of
from kvwarehouse.client.requests import (
    LoadRequest,
    LookupRequest,
    PinRequest,
    ReleaseRequest,
    StoreRequest,
    TiersRequest,
)
from kvwarehouse.client.transport import no_pins, no_tiers, not_visible
from kvwarehouse.errors import UsageError
from kvwarehouse.types import Loaded, Match, Namespace, StoreResult

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


class OpenNamespace:
    """Made by `client.open`; kvwarehouse.OpenNamespace says how a prompt is given."""

    def __init__(
        self,
        space: Namespace,
        life: Life,
        channel: AsyncChannel,
        transport: AsyncTransport,
        *,
        reopen: bool,
    ) -> None:
        self.space = space
        self._life = life
        self._channel = channel
        self._transport = transport
        self._reopen = reopen

    async def lookup(self, tokens: Any = None, *, keys: Keys | None = None) -> Match:
        """As kvwarehouse.OpenNamespace.lookup. Of a local daemon it runs in the loop, up to 4,096
        pages, and longer prompts in a thread."""
        with self._life:
            request = LookupRequest.checked(self.space, tokens, keys)
            if not request.prefix.pages:
                return request.missed()
            return await self._call(self._transport.lookup, request, request.missed)

    async def tiers(
        self, tokens: Any = None, *, keys: Keys | None = None, counted: bool = True
    ) -> NDArray[np.uint8]:
        """As kvwarehouse.OpenNamespace.tiers; runs where lookup does."""
        with self._life:
            request = TiersRequest(self.space, prefix_of(self.space, tokens, keys), counted)
            memory = self._transport.shared_memory
            if memory is None:
                raise no_tiers(self._channel.address)
            return await self._call(memory.tiers, request, request.missed)

    async def load(
        self,
        tokens: Any = None,
        out: Any = None,
        shard: int = 0,
        timeout_s: float = 5.0,
        *,
        keys: Keys | None = None,
        first: int = 0,
    ) -> Loaded:
        """As kvwarehouse.OpenNamespace.load. timeout_s counts the wait for a thread too; where none
        came free in it, nothing was loaded, by reason "timeout".

        Cancelled, `out` holds nothing of meaning, and is the caller's again once the task has
        ended: with a local daemon that is when its waits have, at most timeout_s later, and the
        copy has."""
        with self._life:
            request = LoadRequest.checked(self.space, tokens, keys, out, first, shard, timeout_s)
            if not request.out.count:
                return request.missed()
            return await self._call(self._transport.load, request, request.missed)

    async def store(  # noqa: PLR0913  as of the blocking one
        self,
        tokens: Any = None,
        pages: Any = None,
        shard: int = 0,
        *,
        keys: Keys | None = None,
        first: int = 0,
        timeout_s: float = 5.0,
        since_epoch: int | None = None,
    ) -> StoreResult:
        """As kvwarehouse.OpenNamespace.store. timeout_s counts the wait for a thread too; where
        none came free in it: TransportError (code "deadline").

        Cancelled, it may have stored some pages, all or none. `pages` are read until the task has
        ended: with a local daemon that is when the copy has, at most timeout_s later."""
        with self._life:
            request = StoreRequest.checked(
                self.space, tokens, keys, pages, first, shard, timeout_s, since_epoch
            )
            if not request.pages.count:
                return StoreResult(0, 0, {})
            return await self._call(self._transport.store, request)

    async def pin(
        self,
        tokens: Any = None,
        *,
        keys: Keys | None = None,
        first: int = 0,
        timeout_s: float = 0.0,
    ) -> Pins:
        """As kvwarehouse.OpenNamespace.pin; the Pins are the same, and releasing them does not
        wait: `with await ns.pin(tokens) as pins`. Cancelled, nothing is pinned.

        With timeout_s=0 it runs where lookup does; else in a thread, as a load."""
        with self._life:
            request = PinRequest.checked(self.space, tokens, keys, first, timeout_s)
            memory = self._transport.shared_memory
            if memory is None:
                raise no_pins(self._channel.address)
            return await self._call(memory.pin, request, request.missed)

    async def release(self, tokens: Any = None, *, keys: Keys | None = None, first: int = 0) -> int:
        """As kvwarehouse.OpenNamespace.release; runs where lookup does."""
        with self._life:
            request = ReleaseRequest.checked(self.space, tokens, keys, first)
            if request.first == request.prefix.pages:
                return request.missed()
            return await self._call(self._transport.release, request, request.missed)

    async def _call(
        self,
        call: Callable[[_Request], Awaitable[_Answer]],
        request: _Request,
        missed: Callable[[], _Answer] | None = None,
    ) -> _Answer:
        """As that of the blocking namespace."""
        try:
            return await call(request)
        except UsageError as error:
            if error.code not in UNKNOWN_NAMESPACE or not self._reopen:
                raise
        if missed is not None and not self._transport.patient:
            return missed()
        await register(self._channel, self._transport, self.space)
        return await call(request)


async def open_namespace(
    channel: AsyncChannel, transport: AsyncTransport, space: Namespace
) -> None:
    """As that of kvwarehouse/client/namespace.py, and so `register`."""
    check_namespace(space)
    if not await transport.has_namespace(space):
        await register(channel, transport, space)


async def register(channel: AsyncChannel, transport: AsyncTransport, space: Namespace) -> None:
    await channel.ask(admin.open_namespace(space, channel.address))
    memory = transport.shared_memory
    if memory is not None and not await memory.has_namespace(space):
        raise not_visible(channel.address)
