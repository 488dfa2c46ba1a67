"""A namespace opened at a daemon: lookup, load, store, pin.

Thread-safe. Every argument is checked here, once, whatever the data path beneath.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client.keys import Keys
from kvwarehouse.client.path import DataPath
from kvwarehouse.client.pins import NoPins, Pins
from kvwarehouse.client.prefix import (
    Prefix,
    Window,
    checked_first,
    checked_shard,
    checked_timeout,
    prefix_of,
)
from kvwarehouse.client.regions import Regions, RowRegions
from kvwarehouse.client.rows import page_rows
from kvwarehouse.errors import UsageError
from kvwarehouse.types import Loaded, Match, Namespace, StoreResult

_T = TypeVar("_T")

# What the service and what the core call it.
_UNKNOWN_NAMESPACE = ("unknown_namespace", "namespace_unknown")


class OpenNamespace:
    """Made by `client.open`. A prompt is given as `tokens` (ids, any integer sequence or array, at
    most 1,048,576) or, by engines that hash their own blocks, as `keys` (1 to 64 bytes a page, each
    chaining the ones before it). Only whole pages count.

    keys may also be a list of KeyRun: parts of several prompts in one call, in the order given.
    lookup, load and pin then go on until the first page that is missing, over the ends of runs; a
    store goes on with the other runs. `first` is then 0. Over gRPC: UsageError "unsupported"."""

    def __init__(
        self, space: Namespace, path: DataPath, register: Callable[[Namespace], None] | None
    ) -> None:
        self.space = space
        self._path = path
        self._register = register

    def lookup(self, tokens: Any = None, *, keys: Keys | None = None) -> Match:
        """The longest stored prefix of the prompt. Reads shared memory, no call to a local daemon.

        Promises nothing: what matches now can be evicted before it is loaded, and is then a miss.
        Raises UsageError on bad input; over gRPC, TransportError."""
        prefix = prefix_of(self.space, tokens, keys)
        if not prefix.pages:
            return Match(0, 0, {"dram": 0, "nvme": 0})
        pages, dram, nvme = self._reopening(
            lambda: self._path.lookup(self.space, prefix), lambda: (0, 0, 0)
        )
        return Match(pages, pages * self.space.page_tokens, {"dram": dram, "nvme": nvme})

    def tiers(
        self, tokens: Any = None, *, keys: Keys | None = None, counted: bool = True
    ) -> NDArray[np.uint8]:
        """Where each page is now, as Tier numbers: 0 missing, 1 DRAM, 2 NVMe. Ends at the first gap
        of the prompt, or of each run of keys: pages behind it are 0 too, and pages that stand alone
        are each seen by themselves.

        Reads shared memory, as lookup does, and counts as one, unless counted=False (for who asks
        what to store, not what to load); makes no call, touches no page.

        Raises UsageError on bad input, and (code "unsupported") on a remote client."""
        prefix = prefix_of(self.space, tokens, keys)
        return self._reopening(
            lambda: self._path.tiers(self.space, prefix, counted=counted),
            lambda: np.zeros(prefix.pages, np.uint8),
        )

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
        pages are loaded. Each is verified; a page that fails is a miss, and the load ends before
        it. Blocks for the copy, and for pages on NVMe until they are promoted, at most timeout_s; a
        load cut by its time keeps what arrived in order.

        Returns the pages filled, an int with `.missed`: reasons for the others. Rows of `out` from
        there on hold nothing of meaning. Raises UsageError on bad input, TransportError where a
        remote daemon is gone."""
        prefix = prefix_of(self.space, tokens, keys)
        first = checked_first(first, prefix)
        shard = checked_shard(shard, self.space)
        timeout_s = checked_timeout(timeout_s)
        regions = self._regions(out, "out", writable=True)
        window = Window(first, min(regions.count, prefix.pages - first), shard)
        if not window.pages:
            return Loaded(0)
        regions = regions.head(window.pages)
        pages, missed = self._reopening(
            lambda: self._path.load(self.space, prefix, window, regions, timeout_s),
            lambda: (0, {"missing": window.pages}),
        )
        return Loaded(pages, missed)

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
        pages of the prompt less `first`. Read until the call returns. A page can be loaded by
        anyone once all its shards are stored. Blocks for the copy and one or two short calls, at
        most timeout_s.

        Returns what was stored, was there already, and was dropped by reason (the warehouse is
        full, draining, ...): dropping is not an error, and ends its own run of keys only. Raises
        UsageError on bad input, TransportError when there is no daemon; nothing half-stored is ever
        visible."""
        prefix = prefix_of(self.space, tokens, keys)
        first = checked_first(first, prefix)
        shard = checked_shard(shard, self.space)
        timeout_s = checked_timeout(timeout_s)
        regions = self._regions(pages, "pages", writable=False)
        self._check_count(regions.count, prefix, first)
        if not regions.count:
            return StoreResult(0, 0, {})
        window = Window(first, regions.count, shard)
        stored, already, dropped = self._reopening(
            lambda: self._path.store(self.space, prefix, window, regions, timeout_s)
        )
        return StoreResult(stored, already, dropped)

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
        prefix = prefix_of(self.space, tokens, keys)
        first = checked_first(first, prefix)
        timeout_s = checked_timeout(timeout_s)
        pinned = self._reopening(
            lambda: self._path.pin(self.space, prefix, first, timeout_s), NoPins
        )
        return Pins(pinned)

    def _reopening(self, call: Callable[[], _T], missed: Callable[[], _T] | None = None) -> _T:
        """`call`, once more if the daemon does not know the namespace: another one, or one whose
        ledger was lost, took its place since. Registering is a call: a client without patience has
        `missed` instead, where there is such a thing."""
        try:
            return call()
        except UsageError as error:
            if error.code not in _UNKNOWN_NAMESPACE or self._register is None:
                raise
        if missed is not None and not self._path.patient:
            return missed()
        self._register(self.space)
        return call()

    def _regions(self, pages: Any, name: str, *, writable: bool) -> Regions:
        if pages is None:
            raise UsageError(
                f"{name} is missing; pass uint8 (n, {self.space.page_bytes}) or Regions",
                code="bad_pages",
            )
        if not isinstance(pages, Regions):
            rows = page_rows(pages, self.space.page_bytes, writable=writable)
            return RowRegions(rows, writable)
        if pages.page_bytes != self.space.page_bytes:
            raise UsageError(
                f"{name} has pages of {pages.page_bytes} bytes; expected {self.space.page_bytes}",
                code="bad_pages",
            )
        return pages

    def _check_count(self, given: int, prefix: Prefix, first: int) -> None:
        expected = prefix.pages - first
        if given != expected:
            what = (
                "keys" if prefix.tokens is None else f"whole pages of {len(prefix.tokens)} tokens"
            )
            raise UsageError(
                f"pages has {given} pages; expected {expected} ({prefix.pages} {what}, from page"
                f" {first})",
                code="bad_pages",
                context={"expected": expected, "given": given},
            )
