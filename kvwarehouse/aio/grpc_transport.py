"""The data path over gRPC, for asyncio: the twin of kvwarehouse/client/grpc_transport.py.

Used in one event loop. The loop copies a chunk of at most 1 MiB at a time (from pages in pieces, a
page), and one is under way in each direction; a call that is cancelled touches its pages no more.
"""

from __future__ import annotations

from contextlib import aclosing

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.aio.rpc import AsyncChannel
from kvwarehouse.client.grpc_transport import Filling, Loading, Storing, Transfers
from kvwarehouse.client.prompt import Prefix, Window
from kvwarehouse.client.regions import Regions
from kvwarehouse.client.transport import Pinned
from kvwarehouse.errors import TransportError
from kvwarehouse.types import Control, Namespace


class AsyncGrpc:
    shares_memory = False
    patient = True

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel
        self._transfers = Transfers(channel.endpoint)

    async def opened(self, space: Namespace) -> bool:
        return False  # only the daemon knows; it is asked once a namespace

    def sees(self, space: Namespace) -> bool:
        return False

    async def refresh(self, timeout_s: float) -> bool:
        raise self._transfers.no_refresh()

    async def control(self) -> Control:
        raise self._transfers.no_control()

    async def lookup(self, space: Namespace, prefix: Prefix) -> tuple[int, int, int]:
        return await self._channel.ask(self._transfers.lookup(space, prefix))

    async def tiers(self, space: Namespace, prefix: Prefix, *, counted: bool) -> NDArray[np.uint8]:
        raise self._transfers.no_tiers()

    async def load(
        self, space: Namespace, prefix: Prefix, window: Window, out: Regions, timeout_s: float
    ) -> Loading:
        filling = Filling(out, window.pages)
        call = self._transfers.load(space, prefix, window, filling, timeout_s)
        try:
            async with aclosing(self._channel.stream(call)) as answers:
                async for loading in answers:
                    if loading is not None:
                        return loading
        except TransportError as error:
            if error.code != "deadline":
                raise
            return filling.cut()
        raise self._transfers.without_summary()

    async def store(
        self, space: Namespace, prefix: Prefix, window: Window, pages: Regions, timeout_s: float
    ) -> Storing:
        call = self._transfers.store(space, prefix, window, pages, timeout_s)
        return await self._channel.ask(call)

    async def pin(self, space: Namespace, prefix: Prefix, first: int, timeout_s: float) -> Pinned:
        raise self._transfers.no_pins()

    async def close(self, timeout_s: float) -> None:
        """Nothing of its own: the channel belongs to the client."""
