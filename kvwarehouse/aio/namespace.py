"""A namespace opened at a daemon, for asyncio: the twin of kvwarehouse/client/namespace.py.

Used in the event loop that connected the client.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.aio.life import Life
from kvwarehouse.client.moves import Moves
from kvwarehouse.client.pins import Pins
from kvwarehouse.client.prompt import Keys
from kvwarehouse.types import Loaded, Match, StoreResult


class OpenNamespace:
    """Made by `client.open`; kvwarehouse.OpenNamespace says how a prompt is given."""

    def __init__(self, moves: Moves, life: Life) -> None:
        self.space = moves.space
        self._moves = moves
        self._life = life

    async def lookup(self, tokens: Any = None, *, keys: Keys | None = None) -> Match:
        """As kvwarehouse.OpenNamespace.lookup. Of a local daemon it runs in the loop, up to 4,096
        pages, and longer prompts in a thread."""
        return await self._life.run(self._moves.lookup(tokens, keys))

    async def tiers(
        self, tokens: Any = None, *, keys: Keys | None = None, counted: bool = True
    ) -> NDArray[np.uint8]:
        """As kvwarehouse.OpenNamespace.tiers; runs where lookup does."""
        return await self._life.run(self._moves.tiers(tokens, keys, counted))

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
        ended: with a local daemon that is when the copy has, at most timeout_s later."""
        return await self._life.run(self._moves.load(tokens, keys, out, (first, shard), timeout_s))

    async def store(
        self,
        tokens: Any = None,
        pages: Any = None,
        shard: int = 0,
        *,
        keys: Keys | None = None,
        first: int = 0,
        timeout_s: float = 5.0,
    ) -> StoreResult:
        """As kvwarehouse.OpenNamespace.store. timeout_s counts the wait for a thread too; where
        none came free in it: TransportError (code "deadline").

        Cancelled, it may have stored some pages, all or none. `pages` are read until the task has
        ended: with a local daemon that is when the copy has, at most timeout_s later."""
        return await self._life.run(
            self._moves.store(tokens, keys, pages, (first, shard), timeout_s)
        )

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
        return await self._life.run(self._moves.pin(tokens, keys, first, timeout_s))
