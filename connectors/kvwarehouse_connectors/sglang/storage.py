"""WarehouseStorage: the storage backend of SGLang's HiCache, over the warehouse of this host.

SGLang calls it from three threads (lookups, reads of prefetches, backups), the scheduler's thread
attaches and detaches it. Once it is attached nothing of the warehouse is raised, but by `clear`.
Every call is bounded: lookups read shared memory; loads and stores have the settings' timeouts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.sglang import compat, plugin
from kvwarehouse_connectors.sglang.counts import Counts
from kvwarehouse_connectors.sglang.engine_info import check_engine
from kvwarehouse_connectors.sglang.identity import Identity, adapters_of, weights_of
from kvwarehouse_connectors.sglang.keys import Span
from kvwarehouse_connectors.sglang.page_store import every_page, last_pages, longest
from kvwarehouse_connectors.sglang.pools import WarehousePool
from kvwarehouse_connectors.sglang.settings import WHERE, read_settings
from kvwarehouse_connectors.sglang.weight_updates import UPDATES

_log = logging.getLogger(__name__)


class WarehouseStorage(compat.HiCacheStorage):
    """storage_config: SGLang's HiCacheStorageConfig. Blocks for reading the weights' files, and for
    a daemon that is there. Raises UsageError where the configuration is bad, or where this engine
    cannot be served, naming what was found and what is served. A daemon need not be there."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        self._settings = read_settings(extra)
        ranks = compat.rank_info(storage_config)
        engine = compat.engine_info(storage_config)
        check_engine(engine, ranks)
        self._by_address = bool(extra.get("interface_v1", 0))
        self._check_interface(ranks.tp_lcm_size > ranks.tp_size)
        self._check_weights()
        self._weights_mark = compat.weights_mark()
        weights = weights_of(engine, self._settings)
        self._check_name(weights)
        self._identity = Identity(
            engine,
            ranks,
            weights,
            adapters_of(engine, self._settings),
            self._settings.salt,
        )
        self._counts = Counts()
        self._pools: dict[str, WarehousePool] = {}
        self._serving = True
        self._connection = DaemonConnection(
            self._settings.address,
            ConnectionOptions(verify=self._settings.verify, read_only=not self._settings.stores),
        )

    # -- attaching -----------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, compat.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = compat.pool_name(host_pool_name)
        if name != compat.KV or host_pool is not getattr(self, "mem_pool_host", None):
            self._register(host_pool, name)

    def close(self) -> None:
        """Ends the connection. SGLang has ended its threads before."""
        self._serving = False
        self._connection.close()
        _log.info("kvwarehouse: detached after %s", self._counts.totals())

    # -- lookups -------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the first keys are there."""
        return longest(every_page(self._there(compat.KV, Span.of(keys))))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """The prefixes of `keys` that can be restored from all of the pools."""
        restorable = every_page(self._there(compat.KV, Span.of(keys)))
        hits: dict[str, int] = {compat.KV: longest(restorable)}
        for transfer in pool_transfers or ():
            asked = keys[: longest(restorable)]
            found = self._restorable(transfer, asked)
            hits[compat.pool_name(transfer.name)] = longest(found)
            restorable[: len(found)] &= found
        pages = np.flatnonzero(restorable) + 1
        return compat.PoolTransferResult(longest(restorable), hits, pages.tolist())

    # -- pages, in the host pool's memory ----------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._load(compat.KV, Span.of(keys), host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._store(compat.KV, Span.of(keys), host_indices)

    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        return {one.name: self._load(*_named(one)) for one in transfers}

    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        return {one.name: self._store(*_named(one)) for one in transfers}

    # -- pages, as flat tensors ----------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        found: list[Any] = self.batch_get([key], [target_location])
        return found[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """The target locations that were filled, in order, and None from the first that was not."""
        pool, targets = self._pool(compat.KV), list(target_locations or ())
        filled = pool.load_flat(Span.of(keys), targets) if pool else 0
        if filled and self._pool(compat.KV) is None:
            filled = 0
        return [*targets[:filled], *[None] * (len(keys) - filled)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Whether all are stored."""
        pool = self._pool(compat.KV)
        return pool is not None and all(pool.store_flat(Span.of(keys), list(values or ())))

    # -- the rest ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Removes every page of this engine's namespaces; no restart brings them back. Raises
        WarehouseError where that was not done; SGLang then answers that it failed."""
        client = self._connection.client
        if client is None or self._connection.problem:
            raise kvw.TransportError(
                f"nothing was cleared, there is no daemon at {self._settings.address}:"
                f" {self._connection.problem or 'not connected yet'}",
                code="no_daemon",
            )
        for pool in dict.fromkeys(self._pools.values()):
            client.clear(pool.space)

    def get_stats(self) -> Any:
        """Since the last call, as SGLang's metrics take them."""
        return compat.storage_metrics(*self._counts.take_calls())

    def totals(self) -> dict[str, int]:
        """Pages since the start, by what became of them (counts.py)."""
        return self._counts.totals()

    # -- within --------------------------------------------------------------------------------

    def _register(self, pool: Any, name: str) -> None:
        self._pools[name] = WarehousePool(
            pool,
            compat.pool_info(pool, name),
            self._identity,
            self._connection,
            self._counts,
            self._settings,
        )

    def _pool(self, name: str) -> WarehousePool | None:
        """None where it must not be used: another one than was registered, or other weights, or
        none."""
        if UPDATES.away:
            return None
        if self._serving and compat.weights_mark() != self._weights_mark:
            self._serving = False
            _log.warning(
                "kvwarehouse: the weights were changed; nothing is loaded or stored any more."
                " Flush the cache, detach the storage backend, and attach it with another"
                " kvwarehouse.weights"
            )
        return self._pools.get(name) if self._serving else None

    def _there(self, name: str, span: Span) -> NDArray[np.bool_]:
        pool = self._pool(name)
        return pool.there(span) if pool else np.zeros(len(span), np.bool_)

    def _restorable(self, transfer: Any, keys: list[str]) -> NDArray[np.bool_]:
        there = self._there(compat.pool_name(transfer.name), Span.of(keys))
        if transfer.hit_policy == compat.PoolHitPolicy.TRAILING_PAGES:
            return last_pages(there, len(transfer.keys or ()))
        if transfer.hit_policy == compat.PoolHitPolicy.ALL_PAGES:
            return every_page(there)
        return np.zeros(len(keys), np.bool_)  # a rule that this version does not know

    def _load(self, name: str, span: Span, indices: Any) -> list[bool]:
        pool = self._pool(name)
        filled = pool.load(span, indices) if pool else 0
        if filled and self._pool(name) is None:  # the weights were changed meanwhile
            filled = 0
        return [True] * filled + [False] * (len(span) - filled)

    def _store(self, name: str, span: Span, indices: Any) -> list[bool]:
        pool = self._pool(name)
        return pool.store(span, indices) if pool else [False] * len(span)

    def _check_interface(self, cuts_heads: bool) -> None:
        if self._by_address:
            return
        if cuts_heads:
            raise kvw.UsageError(
                f'{WHERE}: tp_lcm_size needs "interface_v1": 1', code="bad_setting"
            )
        _log.warning(
            'kvwarehouse: without "interface_v1": 1 in %s SGLang copies each page twice', WHERE
        )

    def _check_weights(self) -> None:
        unseen = plugin.unseen()
        if unseen:
            raise kvw.UsageError(
                "kvwarehouse would not see that this engine's weights are changed: its SGLang has"
                f" put no hook to {', '.join(unseen)}. Install kvwarehouse in SGLang's environment,"
                " and name its plugin, kvwarehouse, in SGLANG_PLUGINS if that is set;"
                " docs/sglang.md says which versions were run",
                code="unsupported",
            )
        if not self._settings.weights and compat.weights_changed_before():
            raise kvw.UsageError(
                "kvwarehouse cannot name the weights: they were changed since this engine began."
                f" Set kvwarehouse.weights in {WHERE} to a name of those that it has now",
                code="no_weights",
            )
        if UPDATES.stale or UPDATES.away:
            raise kvw.UsageError(
                "kvwarehouse would store KV of earlier weights: SGLang's cache was not flushed"
                " since they were changed, or they are out of memory. Resume the memory, flush the"
                " cache (POST /flush_cache), and attach again",
                code="unsupported",
            )
        UPDATES.watched = True

    def _check_name(self, weights: str) -> None:
        if not UPDATES.named(weights):
            raise kvw.UsageError(
                f"kvwarehouse.weights is {weights!r}, as before the weights were changed. Set it in"
                f" {WHERE} to a name of those that the engine has now",
                code="no_weights",
            )


def _named(transfer: Any) -> tuple[str, Span, Any]:
    return (
        compat.pool_name(transfer.name),
        Span.of(list(transfer.keys or ())),
        transfer.host_indices,
    )
