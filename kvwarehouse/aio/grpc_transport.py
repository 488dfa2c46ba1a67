"""The transport over gRPC, for asyncio: the twin of kvwarehouse/client/grpc_transport.py.

Used in one event loop. The loop copies a chunk of at most 1 MiB at a time (from pages in pieces, a
page), and one is under way in each direction; a call that is cancelled touches its pages no more.
"""

from __future__ import annotations

from contextlib import aclosing

from kvwarehouse.aio.rpc import AsyncChannel
from kvwarehouse.aio.transport import AsyncTransport
from kvwarehouse.client.grpc_transport import Filling, PageCalls
from kvwarehouse.client.requests import (
    LoadRequest,
    LookupRequest,
    ReleaseRequest,
    StoreRequest,
)
from kvwarehouse.errors import TransportError
from kvwarehouse.types import Loaded, Match, Namespace, StoreResult


class AsyncGrpc(AsyncTransport):
    patient = True
    shared_memory = None

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel
        self._calls = PageCalls(channel.address)

    async def has_namespace(self, space: Namespace) -> bool:
        return False  # only the daemon knows; it is asked once a namespace

    async def lookup(self, request: LookupRequest) -> Match:
        return await self._channel.ask(self._calls.lookup(request))

    async def load(self, request: LoadRequest) -> Loaded:
        filling = Filling(request.out)
        call = self._calls.load(request, filling)
        try:
            async with aclosing(self._channel.stream(call)) as answers:
                async for loaded in answers:
                    if loaded is not None:
                        return loaded
        except TransportError as error:
            if error.code != "deadline":
                raise
            return filling.cut()
        raise self._calls.without_summary()

    async def store(self, request: StoreRequest) -> StoreResult:
        with self._calls.since_refused(request):
            return await self._channel.ask(self._calls.store(request))

    async def release(self, request: ReleaseRequest) -> int:
        return await self._channel.ask(self._calls.release(request))

    async def close(self, timeout_s: float) -> None:
        """Nothing of its own: the channel belongs to the client."""
