"""One host pool of an engine, with its pages in the warehouse.

Made in the thread that attaches it; then thread-safe.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.sglang.counts import Counts
from kvwarehouse_connectors.sglang.engine_info import PoolInfo, check_pool, split_of
from kvwarehouse_connectors.sglang.identity import Identity, PageBytes
from kvwarehouse_connectors.sglang.keys import Span
from kvwarehouse_connectors.sglang.memory import PieceMemory, page_numbers, piece_memory
from kvwarehouse_connectors.sglang.page_slots import CopiedSlots, FlatSlots, PageSlots, PoolSlots
from kvwarehouse_connectors.sglang.page_store import PoolPages, PoolPagesOptions
from kvwarehouse_connectors.sglang.self_test import layout_self_test
from kvwarehouse_connectors.sglang.settings import Settings

_log = logging.getLogger(__name__)

# At the start a daemon that is there has registered the pages, or refused them, by then.
_REGISTER_S = 5.0


class WarehousePool:
    """Raises UsageError where the pool cannot be served, naming why."""

    def __init__(
        self,
        pool: Any,
        info: PoolInfo,
        identity: Identity,
        connection: DaemonConnection,
        counts: Counts,
        settings: Settings,
    ) -> None:
        check_pool(info, identity.ranks)
        split = split_of(info, identity.ranks)
        self._pool = pool
        self._info = info
        self._settings = settings
        self._counts = counts
        self._memory = _memory(pool, info, len(split.mine))
        page = _page_bytes(pool, self._memory)
        self.part_bytes = page.size
        self.space = identity.namespace(info, split, page)
        self._pages = PoolPages(
            connection,
            self.space,
            counts,
            PoolPagesOptions(split.mine, settings.load_timeout_s, settings.store_timeout_s),
        )
        connection.wait_namespace(self.space, _REGISTER_S)
        _log.info(
            "kvwarehouse: pool %s, %d bytes a page in %d of %d shards, namespace %s",
            info.name,
            page.size,
            len(split.mine),
            split.shards,
            self.space.id.hex(),
        )

    def there(self, span: Span) -> NDArray[np.bool_]:
        if not self._settings.loads or not len(span):
            return np.zeros(len(span), np.bool_)
        return self._pages.there(span)

    def load(self, span: Span, indices: Any) -> int:
        """Into the slots `indices`, one a token: how many pages came, in order."""
        if not self._settings.loads or not len(span):
            return 0
        slots = self._slots(len(span), indices, writes=True)
        return self._pages.load(span, slots) if slots else 0

    def store(self, span: Span, indices: Any) -> list[bool]:
        """From the slots `indices`, one a token: of each page whether it is stored."""
        if not self._stores(span):
            return [False] * len(span)
        slots = self._slots(len(span), indices, writes=False)
        return self._pages.store(span, slots) if slots else [False] * len(span)

    def load_flat(self, span: Span, tensors: Sequence[Any]) -> int:
        """Into flat pages, one a key: how many came, in order."""
        if not self._settings.loads or not self._fits(span, tensors):
            return 0
        return self._pages.load(span, FlatSlots(tensors))

    def store_flat(self, span: Span, tensors: Sequence[Any]) -> list[bool]:
        if not self._stores(span) or not self._fits(span, tensors):
            return [False] * len(span)
        return self._pages.store(span, FlatSlots([tensor.contiguous() for tensor in tensors]))

    def _stores(self, span: Span) -> bool:
        if self._settings.stores and len(span):
            return True
        self._counts.why("dropped", {"read_only": len(span)} if len(span) else {})
        return False

    def _fits(self, span: Span, tensors: Sequence[Any]) -> bool:
        """Flat pages are of one part, and of the size that the pool has them."""
        whole = self._memory is None or self._memory.parts == 1
        return (
            whole
            and 0 < len(span) == len(tensors)
            and all(getattr(tensor, "nbytes", -1) == self.part_bytes for tensor in tensors)
        )

    def _slots(self, pages: int, indices: Any, *, writes: bool) -> PageSlots | None:
        """None where the slots are not whole pages of the pool."""
        tokens, most = int(self._pool.page_size), int(self._pool.page_num)
        try:
            numbers = page_numbers(indices, pages, tokens, most)
        except (kvw.UsageError, TypeError, ValueError) as error:
            _log.error("kvwarehouse: pool %s: %s", self._info.name, error)
            return None
        if self._memory is None:
            return CopiedSlots(self._pool, numbers, writes=writes)
        return PoolSlots(self._memory, numbers)


def _memory(pool: Any, info: PoolInfo, parts: int) -> PieceMemory | None:
    """None for states that tell no addresses: their pages are few, and are copied."""
    try:
        memory = piece_memory(pool, parts)
    except kvw.UsageError:
        if info.kind != "state" and info.kind != "index":
            raise
        return None
    if not layout_self_test(pool, memory):
        _log.warning(
            "kvwarehouse: pool %s lent no page for a self-test, being full; it goes untested",
            info.name,
        )
    return memory


def _page_bytes(pool: Any, memory: PieceMemory | None) -> PageBytes:
    if memory is None:
        return PageBytes(pool.get_dummy_flat_data_page().nbytes, "copied")
    return PageBytes(memory.part_bytes, memory.order)
