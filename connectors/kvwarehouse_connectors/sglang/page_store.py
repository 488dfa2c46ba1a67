"""The pages of one host pool in the warehouse, and which prefixes of a prompt can be restored where
a model keeps several kinds of state: of some every page of the prefix is needed, of others
(windows, states) only the last ones before its end.

What the warehouse does is never raised, but counted. Thread-safe: SGLang's threads for prefetches,
their reads and backups call at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.core.page_store import LOOKUP_KEYS, PageStore
from kvwarehouse_connectors.sglang.counts import Counts
from kvwarehouse_connectors.sglang.keys import Span
from kvwarehouse_connectors.sglang.page_slots import PageSlots

# A load looks so often whether the daemon lives still.
_SLICE_S = 0.5


@dataclass(frozen=True)
class PoolPagesOptions:
    """shards: which of a page's this rank has, in the order of its parts."""

    shards: tuple[int, ...]
    load_timeout_s: float
    store_timeout_s: float


class PoolPages(PageStore):
    """space: the namespace of its pages."""

    def __init__(
        self,
        connection: DaemonConnection,
        space: kvw.Namespace,
        counts: Counts,
        options: PoolPagesOptions,
    ) -> None:
        super().__init__(connection)
        self._space = space
        self._counts = counts
        self._options = options

    def there(self, span: Span) -> NDArray[np.bool_]:
        """Of each page, whether a load may expect it now. What is on NVMe only comes while the
        daemon is alive. Reads shared memory, no call."""
        found = np.zeros(len(span), np.bool_)
        for begin in range(0, len(span), LOOKUP_KEYS):
            part = span.cut(begin, begin + LOOKUP_KEYS)
            found[begin : begin + len(part)] = self._present(part, counted=True)
        self._counts.add(hit_pages=int(found.sum()))
        return found

    def load(self, span: Span, slots: PageSlots) -> int:
        """Fills the slots, in order, up to the first page that does not come; returns how many.
        Each page is verified. The slots behind them may hold anything."""
        began = time.monotonic()
        end = began + (self._options.load_timeout_s if self.alive else 0.0)
        filled = len(span)
        for part in range(len(self._options.shards)):
            filled = self._load_part(span.cut(0, filled), slots, part, end)
            if not filled:
                return 0
        slots.take(filled)
        size = filled * len(self._options.shards) * self._space.page_bytes
        self._counts.loaded(filled, size, time.monotonic() - began)
        return filled

    def store(self, span: Span, slots: PageSlots) -> list[bool]:
        """Of each page, whether it was stored, is there, or is being stored by another rank. Where
        some were not, those count that can be loaded now."""
        if not self.alive:
            self._counts.why("dropped", {"unreachable": len(span)})
            return [False] * len(span)
        began = time.monotonic()
        end = began + self._options.store_timeout_s
        results = []
        for part, shard in enumerate(self._options.shards):
            left = max(0.0, end - time.monotonic())
            regions = partial(slots.regions, part)
            results.append(self._store(self._space, span, regions, left, shard))
        self._count_stores(results, time.monotonic() - began)
        if not any(result.dropped for result in results):
            return [True] * len(span)
        return [bool(there) for there in self._present(span, counted=False)]

    def _present(self, span: Span, *, counted: bool) -> NDArray[np.bool_]:
        return self._reachable(self._tiers(self._space, span, counted=counted))

    def _count_stores(self, results: list[kvw.StoreResult], seconds: float) -> None:
        """results: one for each part. A page counts once, however many parts it has; of those that
        were not stored, as the part has it of which most were not."""
        stored = sum(result.stored for result in results)
        already = sum(result.already for result in results)
        self._counts.stored(stored // len(results), stored * self._space.page_bytes, seconds)
        self._counts.add(already_pages=already // len(results))
        worst = max(results, key=lambda result: result.dropped_pages)
        self._counts.why("dropped", worst.dropped)

    def _load_part(self, span: Span, slots: PageSlots, part: int, end_s: float) -> int:
        """Waits for pages on NVMe a while at a time, so that a daemon that stops is noticed."""
        filled = 0
        while True:
            left = max(0.0, end_s - time.monotonic())
            rest = span.cut(filled, len(span))
            loaded = self._load(
                self._space,
                rest,
                partial(_regions, slots, part, filled, len(rest)),
                min(left, _SLICE_S),
                self._options.shards[part],
            )
            filled += int(loaded)
            waits = "timeout" in loaded.missed and left > _SLICE_S and self.alive
            if not waits or filled == len(span):
                self._counts.why("missed", loaded.missed)
                return filled


def _regions(slots: PageSlots, part: int, begin: int, pages: int) -> kvw.Regions:
    return slots.regions(part, begin).head(pages)


def every_page(there: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """there: of each page. Returns, for prefixes of 1, 2, ... pages, whether all theirs are."""
    return np.logical_and.accumulate(there)


def last_pages(there: NDArray[np.bool_], trailing: int) -> NDArray[np.bool_]:
    """As every_page, where only the last `trailing` pages of a prefix are needed, or all of one
    that is shorter."""
    gaps = np.concatenate([[0], np.cumsum(~there)])
    ends = np.arange(1, len(there) + 1)
    good: NDArray[np.bool_] = gaps[ends] == gaps[np.maximum(0, ends - max(1, trailing))]
    return good


def longest(restorable: NDArray[np.bool_]) -> int:
    """Pages of the longest prefix that can be restored; 0 where there is none."""
    found = np.flatnonzero(restorable)
    return int(found[-1]) + 1 if len(found) else 0
