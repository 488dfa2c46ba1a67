"""What lookup, tiers, load, store and pin do with a namespace, as flows.

Every argument is checked here, once, whatever the data path beneath. Thread-safe as its path is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client.ends import Ends, registering
from kvwarehouse.client.flow import Flow, finish
from kvwarehouse.client.pins import NoPins, Pins
from kvwarehouse.client.prompt import (
    Keys,
    Prefix,
    Window,
    checked_first,
    checked_shard,
    checked_timeout,
    prefix_of,
)
from kvwarehouse.client.regions import Regions, rows_of
from kvwarehouse.errors import UsageError
from kvwarehouse.types import Loaded, Match, Namespace, StoreResult

if TYPE_CHECKING:
    from kvwarehouse import core

# What the service and what the core call it.
_UNKNOWN_NAMESPACE = ("unknown_namespace", "namespace_unknown")
# 2^64 over the golden ratio: shards of a page are far from each other, and from other pages'.
_SHARD_STEP = 0x9E3779B97F4A7C15


class Moves:
    """Of one namespace. `reopen`: registers it again at a daemon that does not know it."""

    def __init__(self, space: Namespace, ends: Ends, *, reopen: bool) -> None:
        self.space = space
        self._ends = ends
        self._path = ends.path
        self._reopen = reopen

    def lookup(self, tokens: Any, keys: Keys | None) -> Flow[Match]:
        prefix = prefix_of(self.space, tokens, keys)
        if not prefix.pages:
            return _match(self.space.page_tokens, 0, 0, 0)
        found = yield from self._reopening(
            lambda: self._path.lookup(self.space, prefix), lambda: (0, 0, 0)
        )
        return _match(self.space.page_tokens, *found)

    def tiers(self, tokens: Any, keys: Keys | None, counted: bool) -> Flow[NDArray[np.uint8]]:
        prefix = prefix_of(self.space, tokens, keys)
        found: NDArray[np.uint8] = yield from self._reopening(
            lambda: self._path.tiers(self.space, prefix, counted=counted),
            lambda: np.zeros(prefix.pages, np.uint8),
        )
        return found

    def load(
        self, tokens: Any, keys: Keys | None, out: Any, window: tuple[int, int], timeout_s: float
    ) -> Flow[Loaded]:
        """window: the first page and the shard, as they were given."""
        prefix, wanted, regions = self.loading(tokens, keys, out, window)
        timeout_s = checked_timeout(timeout_s)
        if not wanted.pages:
            return Loaded(0)
        pages, missed = yield from self._reopening(
            lambda: self._path.load(self.space, prefix, wanted, regions, timeout_s),
            lambda: (0, {"missing": wanted.pages}),
        )
        return Loaded(pages, missed)

    def loading(
        self, tokens: Any, keys: Keys | None, out: Any, window: tuple[int, int]
    ) -> tuple[Prefix, Window, Regions]:
        """What a load was asked for, checked: its pages, which of them, and where they go."""
        prefix = prefix_of(self.space, tokens, keys)
        first = checked_first(window[0], prefix)
        shard = checked_shard(window[1], self.space)
        regions = self._regions(out, "out", writable=True)
        wanted = Window(first, min(regions.count, prefix.pages - first), shard)
        return prefix, wanted, regions.head(wanted.pages)

    def store(
        self, tokens: Any, keys: Keys | None, pages: Any, window: tuple[int, int], timeout_s: float
    ) -> Flow[StoreResult]:
        """window: the first page and the shard, as they were given."""
        prefix = prefix_of(self.space, tokens, keys)
        first = checked_first(window[0], prefix)
        shard = checked_shard(window[1], self.space)
        timeout_s = checked_timeout(timeout_s)
        regions = self._regions(pages, "pages", writable=False)
        self._check_count(regions.count, prefix, first)
        if not regions.count:
            return StoreResult(0, 0, {})
        given = Window(first, regions.count, shard)
        stored, already, dropped = yield from self._reopening(
            lambda: self._path.store(self.space, prefix, given, regions, timeout_s)
        )
        return StoreResult(stored, already, dropped)

    def pin(self, tokens: Any, keys: Keys | None, first: int, timeout_s: float) -> Flow[Pins]:
        prefix = prefix_of(self.space, tokens, keys)
        first = checked_first(first, prefix)
        timeout_s = checked_timeout(timeout_s)
        pinned = yield from self._reopening(
            lambda: self._path.pin(self.space, prefix, first, timeout_s), NoPins
        )
        return Pins(pinned)

    # --- for nvme_reader.py and kvwarehouse/gpu: of the blocking client alone, with arguments that
    # `loading` checked

    def tiers_of(self, prefix: Prefix) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = finish(
            self._reopening(
                lambda: self._path.tiers(self.space, prefix, counted=False),
                lambda: np.zeros(prefix.pages, np.uint8),
            )
        )
        return found

    def tags_of(self, prefix: Prefix, shard: int) -> NDArray[np.uint64]:
        """A word for each page's shard, as good as its key and number for telling it from
        others."""
        found: NDArray[np.uint64] = self._path.tags(self.space, prefix)
        return found + np.uint64(shard * _SHARD_STEP % (1 << 64))

    def load_window(
        self, prefix: Prefix, window: Window, out: Regions, timeout_s: float
    ) -> tuple[int, dict[str, int]]:
        filled: tuple[int, dict[str, int]]
        filled = self._path.load(self.space, prefix, window, out, timeout_s)
        return filled

    def hold(self, prefix: Prefix, window: Window, timeout_s: float) -> core.Extents:
        """The window's pages that are on NVMe, from its first on, held there."""
        held: core.Extents = self._path.hold(self.space, prefix, window, timeout_s)
        return held

    def segments(self, timeout_s: float) -> str:
        """Where the daemon's segments are, for any process of this user; "" where it has none, or
        does not say."""
        found: str = self._path.segments(timeout_s)
        return found

    def device_stage(self, ordinal: int, size_bytes: int) -> core.DeviceStage:
        """Memory of a GPU for held pages to land in."""
        made: core.DeviceStage = self._path.device_stage(ordinal, size_bytes)
        return made

    def _reopening(
        self, call: Callable[[], Any], missed: Callable[[], Any] | None = None
    ) -> Flow[Any]:
        """`call`, once more if the daemon does not know the namespace: another one, or one whose
        ledger was lost, took its place since. Registering is a call: a client without patience has
        `missed` instead, where there is such a thing."""
        try:
            return (yield call())
        except UsageError as error:
            if error.code not in _UNKNOWN_NAMESPACE or not self._reopen:
                raise
        if missed is not None and not self._path.patient:
            return missed()
        yield from registering(self._ends, self.space)
        return (yield call())

    def _regions(self, pages: Any, name: str, *, writable: bool) -> Regions:
        if pages is None:
            raise UsageError(
                f"{name} is missing; pass uint8 (n, {self.space.page_bytes}) or Regions",
                code="bad_pages",
            )
        if not isinstance(pages, Regions):
            return rows_of(pages, self.space.page_bytes, writable=writable).behind_streams()
        if pages.page_bytes != self.space.page_bytes:
            raise UsageError(
                f"{name} has pages of {pages.page_bytes} bytes; expected {self.space.page_bytes}",
                code="bad_pages",
            )
        return pages.behind_streams()

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


def _match(page_tokens: int, hbm: int, dram: int, nvme: int) -> Match:
    pages = hbm + dram + nvme
    return Match(pages, pages * page_tokens, {"hbm": hbm, "dram": dram, "nvme": nvme})
