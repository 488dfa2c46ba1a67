"""A namespace opened at a daemon: lookup, load, store, pin.

Thread-safe. kvwarehouse/aio/namespace.py is its twin; what both do is in moves.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client.flow import finish
from kvwarehouse.client.moves import Moves
from kvwarehouse.client.pins import Pins
from kvwarehouse.client.prompt import Keys
from kvwarehouse.types import Loaded, Match, StoreResult


class OpenNamespace:
    """Made by `client.open`. A prompt is given as `tokens` (ids, any integer sequence or array, at
    most 1,048,576) or, by engines that hash their own blocks, as `keys` (1 to 64 bytes a page, each
    chaining the ones before it). Only whole pages count.

    keys may also be a list of KeyRun: parts of several prompts in one call, in the order given.
    lookup, load and pin then go on until the first page that is missing, over the ends of runs; a
    store goes on with the other runs. `first` is then 0. Over gRPC: UsageError "unsupported"."""

    def __init__(self, moves: Moves) -> None:
        self.space = moves.space
        self._moves = moves

    def lookup(self, tokens: Any = None, *, keys: Keys | None = None) -> Match:
        """The longest stored prefix of the prompt. Reads shared memory, no call to a local daemon.

        Promises nothing: what matches now can be evicted before it is loaded, and is then a miss.
        Raises UsageError on bad input; over gRPC, TransportError."""
        return finish(self._moves.lookup(tokens, keys))

    def tiers(
        self, tokens: Any = None, *, keys: Keys | None = None, counted: bool = True
    ) -> NDArray[np.uint8]:
        """Where each page is now, as Tier numbers: 0 missing, 1 DRAM, 2 NVMe. Ends at the first gap
        of the prompt, or of each run of keys: pages behind it are 0 too, and pages that stand alone
        are each seen by themselves.

        Reads shared memory, as lookup does, and counts as one, unless counted=False (for who asks
        what to store, not what to load); makes no call, touches no page.

        Raises UsageError on bad input, and (code "unsupported") on a remote client."""
        return finish(self._moves.tiers(tokens, keys, counted))

    def load(
        self,
        tokens: Any = None,
        out: Any = None,
        shard: int = 0,
        timeout_s: float = 5.0,
        *,
        keys: Keys | None = None,
        first: int = 0,
    ) -> Loaded:
        """Fills `out` with one shard of the longest stored prefix, from page `first` on.

        out: uint8 (k, page_bytes), C-contiguous and writable, or Regions of k pages; at most k
        pages are loaded. What it waits for on a GPU: see Regions.on_device. Each page is verified;
        one that fails is a miss, and the load ends before it. Blocks for the copy, and for pages on
        NVMe until they are promoted, at most timeout_s; a load cut by its time keeps what arrived
        in order.

        Returns the pages filled, an int with `.missed`: reasons for the others. Rows of `out` from
        there on hold nothing of meaning. Raises UsageError on bad input, TransportError where a
        remote daemon is gone."""
        return finish(self._moves.load(tokens, keys, out, (first, shard), timeout_s))

    def store(
        self,
        tokens: Any = None,
        pages: Any = None,
        shard: int = 0,
        *,
        keys: Keys | None = None,
        first: int = 0,
        timeout_s: float = 5.0,
    ) -> StoreResult:
        """Stores one shard of every whole page of the prompt, from page `first` on.

        pages: uint8 (n, page_bytes), C-contiguous, or Regions of n pages, where n is the whole
        pages of the prompt less `first`. Read until the call returns; what it waits for on a GPU:
        see Regions.on_device. A page can be loaded by anyone once all its shards are stored. Blocks
        for the copy and one or two short calls, at most timeout_s.

        Returns what was stored, was there already, and was dropped by reason (the warehouse is
        full, draining, ...): dropping is not an error, and ends its own run of keys only. Raises
        UsageError on bad input, TransportError when there is no daemon; nothing half-stored is ever
        visible."""
        return finish(self._moves.store(tokens, keys, pages, (first, shard), timeout_s))

    def pin(
        self,
        tokens: Any = None,
        *,
        keys: Keys | None = None,
        first: int = 0,
        timeout_s: float = 0.0,
    ) -> Pins:
        """Holds the longest stored prefix from page `first` in DRAM, so that work queued on a
        device may read it. Pages on NVMe are promoted first, as far as timeout_s reaches.

        Returns Pins (0 pages where nothing matched). Raises PinError over the budget of pins, and
        UsageError (code "unsupported") on a remote client, which shares no memory."""
        return finish(self._moves.pin(tokens, keys, first, timeout_s))
