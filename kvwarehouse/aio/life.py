"""Where and how long a client may be used: in one process, in one event loop, until it is closed.

Everything runs in that loop; `check` says so to who comes from elsewhere.
"""

from __future__ import annotations

import asyncio
import os

from kvwarehouse.client.endpoint import closed, forked
from kvwarehouse.errors import UsageError


class Life:
    """Begins in the running loop. Each call of the client is made `with` it."""

    def __init__(self) -> None:
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def forked(self) -> bool:
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises UsageError (codes "wrong_loop", "closed"), and TransportError after a fork."""
        if self.forked:
            raise forked()
        self.check_loop()
        if self.closed:
            raise closed()

    def check_loop(self) -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop:
            raise UsageError(
                "this client was connected in another event loop; connect one in this loop, or run"
                " the call in the client's with asyncio.run_coroutine_threadsafe",
                code="wrong_loop",
            )

    def __enter__(self) -> None:
        """Begins a call of the client, which closing waits for. Raises as `check`."""
        self.check()
        self._under_way += 1
        self._idle.clear()

    def __exit__(self, *error: object) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    async def idle(self, timeout_s: float) -> bool:
        """Waits for all calls under way, at most timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
