"""Prefill with reuse: load the longest stored prefix, compute the rest, store what is new.

Not thread-safe, as a model's forward; stores run in a thread of their own. Invariants: what a load
did not verify is never attended to; nothing is stored of a prefill whose load failed; once the
weights are others than at the start, nothing is loaded or stored; whatever happens to the
warehouse, the prompt is answered.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core import PageGeometry
from kvwarehouse_connectors.core.device_copies import WISHES
from kvwarehouse_connectors.transformers.grid import ChunkGrid
from kvwarehouse_connectors.transformers.identity import namespace_of
from kvwarehouse_connectors.transformers.link import Link
from kvwarehouse_connectors.transformers.result import (
    PrefillResult,
    PrefillStats,
    Reuse,
    StatsCounter,
    StoreState,
)
from kvwarehouse_connectors.transformers.room import RoomyCache
from kvwarehouse_connectors.transformers.storing import StoreJobs
from kvwarehouse_connectors.transformers.support import (
    observe,
    require_supported,
    require_unchanged,
    with_cache,
)
from kvwarehouse_connectors.transformers.transfer import Stored, transfer_for
from kvwarehouse_connectors.transformers.watched_weights import WatchedWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefillOptions:
    """page_tokens: the unit of storage. chunk_tokens: the unit of computing, a multiple of it; all
    who share pages share both. Larger chunks compute a little faster, smaller ones leave less to
    compute after a load."""

    page_tokens: int = 64
    chunk_tokens: int = 512
    room_tokens: int = 256
    """Room for generated tokens; a cache grows beyond it, by a copy."""
    load_timeout_s: float = 2.0
    """Bound of waiting for pages on NVMe; what arrived in order is used."""
    store_timeout_s: float = 30.0
    pending_stores: int = 4
    """Bound of stores that wait, each keeping its cache's memory."""
    device_copies: str = "auto"
    """auto: pages of a GPU go straight between its memory and the warehouse's, where that is
    possible; off: always through a buffer in host memory."""

    def __post_init__(self) -> None:
        if self.device_copies not in WISHES:
            raise kvw.UsageError(
                f"device_copies is {self.device_copies!r}; it is one of {', '.join(WISHES)}",
                code="bad_setting",
            )


@dataclass(frozen=True)
class LoadedPrefix:
    """A prompt of which the first `reuse.tokens_loaded` tokens are in `cache`."""

    input_ids: Any
    tokens: NDArray[np.int64]
    cache: RoomyCache
    reuse: Reuse
    started: float


_CHANGED = Reuse(
    failure="the model's weights were changed since the connector was made", weights_changed=True
)


class WarehousePrefill:
    """A model joined to a warehouse. Also a context manager.

    model: a causal LM with a plain cache in every layer, in eval mode. client: a kvw.Client, which
    stays yours, or an address. weights: kvw.fingerprint of the checkpoint; two models with one
    fingerprint share KV. From then on the model's weights are watched: make another connector, with
    another fingerprint, once they were changed. Raises UsageError where the model is not supported
    (naming what was found) or the options do not fit; a daemon that is not there is no error."""

    def __init__(
        self,
        model: Any,
        client: kvw.Client | str,
        *,
        weights: str,
        options: PrefillOptions | None = None,
    ) -> None:
        options = options or PrefillOptions()
        require_supported(model)
        self._model = model
        self._options = options
        self._grid = ChunkGrid(options.page_tokens, options.chunk_tokens)
        self._shape = observe(model)
        self._weights = WatchedWeights(model)
        self._geometry = PageGeometry(self._shape.planes, options.page_tokens)
        self.space = namespace_of(model, weights, self._shape, self._geometry, self._grid)
        self._stats = StatsCounter()
        self._transfer = transfer_for(
            self._shape.device,
            self._geometry,
            options.device_copies,
            lambda: self._stats.add(PrefillStats(device_fallbacks=1)),
            client if isinstance(client, kvw.Client) else None,
        )
        self._link = Link(client, self.space)
        self._stores = StoreJobs(options.pending_stores, self._count_store)
        try:
            self._link.opened()
        except kvw.UsageError:
            raise
        except kvw.WarehouseError as error:
            _log.warning("no warehouse yet, prompts are computed: %s", error)

    def prefill(self, input_ids: Any, *, store: bool = True) -> PrefillResult:
        """Computes a prompt, reusing what is stored of it.

        input_ids: one prompt's ids, [T] or [1, T], integers, T > 0. Returns when the last token's
        logits are there; new pages are stored after that, in the background (flush waits for
        them), unless store is False. Raises UsageError on bad input; failures of the warehouse are
        in result.reuse.failure."""
        return self._complete(self.load_prefix(input_ids), store)

    def load_prefix(self, input_ids: Any) -> LoadedPrefix:
        """The first half of prefill: a cache with the longest stored prefix that the prompt can
        use, or an empty one."""
        started = time.perf_counter()
        require_unchanged(self._model)
        ids, tokens = self._prompt(input_ids)
        cache = self._cache(tokens)
        reuse = self._reuse(tokens, cache) if self._weights.same() else _CHANGED
        if reuse.failure is not None:
            cache = self._cache(tokens)  # what a device that hangs may still write to is not used
        cache.show(reuse.tokens_loaded)
        return LoadedPrefix(ids, tokens, cache, reuse, started)

    def complete(self, prefix: LoadedPrefix, *, store: bool = True) -> PrefillResult:
        """The second half: computes the rest, and queues the store. What was loaded is computed too
        where the weights were changed in between."""
        if not self._weights.same():
            prefix = replace(prefix, cache=self._cache(prefix.tokens), reuse=_CHANGED)
            prefix.cache.show(0)
        return self._complete(prefix, store)

    def _complete(self, prefix: LoadedPrefix, store: bool) -> PrefillResult:
        computing = time.perf_counter()
        logits = self._compute(prefix)
        done = time.perf_counter()
        state = self._store(prefix) if store else StoreState.OFF
        self._count(prefix, state)
        return PrefillResult(
            cache=prefix.cache,
            logits=logits,
            prompt_tokens=len(prefix.tokens),
            reuse=prefix.reuse,
            compute_s=done - computing,
            total_s=done - prefix.started,
            store=state,
        )

    def stats(self) -> PrefillStats:
        return self._stats.snapshot()

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits until the stores of prefills so far ended, at most timeout_s; False where some did
        not, or where one failed since the last flush. (client.flush() then waits for the disk.)"""
        return self._stores.flush(timeout_s)

    def close(self) -> None:
        """Finishes queued stores. More than once is once."""
        self._stores.close()
        self._transfer.close()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prompt(self, input_ids: Any) -> tuple[torch.Tensor, NDArray[np.int64]]:
        ids = torch.as_tensor(input_ids)
        if ids.ndim == 1:
            ids = ids.unsqueeze(0)
        integers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1] or not integers:
            raise kvw.UsageError(
                f"input_ids is {ids.dtype} of shape {list(ids.shape)}; pass one prompt's ids,"
                " integers of shape [T] or [1, T] with T > 0, without padding",
                code="bad_input_ids",
            )
        tokens = ids[0].to("cpu", torch.int64).numpy()
        return ids.to(self._shape.device, torch.int64), tokens

    def _cache(self, tokens: NDArray[np.int64]) -> RoomyCache:
        room_tokens = len(tokens) + self._options.room_tokens
        return RoomyCache(self._model.config, self._shape, room_tokens)

    def _reuse(self, tokens: NDArray[np.int64], cache: RoomyCache) -> Reuse:
        """Lookup and load. Never raises for the warehouse's sake."""
        started = time.perf_counter()
        reuse = Reuse()
        try:
            space = self._link.opened()
            match = space.lookup(tokens)
            looked_up = time.perf_counter()
            reuse = replace(
                reuse,
                tokens_matched=match.tokens,
                pages_by_tier=dict(match.by_tier),
                lookup_s=looked_up - started,
            )
            wanted = self._grid.reusable_tokens(len(tokens), match.tokens)
            if not wanted:
                return reuse
            pages = self._transfer.load(
                space, tokens[:wanted], cache.rooms, self._options.load_timeout_s
            )
        except Exception as error:  # noqa: BLE001 - the engine's edge: it recomputes and goes on
            # Its text alone: whoever keeps the log's records would keep its frames, and the cache.
            failure = f"{type(error).__name__}: {error}"
            _log.warning("load failed, computing the prompt: %s", failure)
            return replace(reuse, failure=failure)
        return replace(
            reuse,
            tokens_loaded=self._grid.reusable_tokens(len(tokens), pages * self.space.page_tokens),
            bytes_loaded=pages * self.space.page_bytes,
            load_s=time.perf_counter() - looked_up,
        )

    def _compute(self, prefix: LoadedPrefix) -> torch.Tensor:
        arguments = with_cache(self._model, prefix.cache)
        if self._shape.keeps_logits:
            arguments["logits_to_keep"] = 1
        logits: Any = None
        with torch.no_grad():
            for first, end in self._grid.chunks(prefix.reuse.tokens_loaded, len(prefix.tokens)):
                output = self._model(
                    input_ids=prefix.input_ids[:, first:end],
                    use_cache=True,
                    **arguments,
                )
                logits = output.logits
        return logits[:, -1, :]

    def _store(self, prefix: LoadedPrefix) -> StoreState:
        if prefix.reuse.weights_changed:
            return StoreState.WEIGHTS_CHANGED
        if prefix.reuse.failure is not None:
            return StoreState.LOAD_FAILED
        storable = self._grid.storable_tokens(len(prefix.tokens))
        if storable <= self._known_tokens(prefix):
            return StoreState.NOTHING_NEW
        prefix.cache.hold(storable)
        tokens = prefix.tokens[:storable].copy()
        rooms = prefix.cache.rooms
        first = prefix.reuse.tokens_loaded // self.space.page_tokens
        timeout_s = self._options.store_timeout_s
        after = self._transfer.computed(rooms)

        def job() -> Stored:
            opened = self._link.opened()
            return self._transfer.store(opened, tokens, rooms, first, timeout_s, after)

        return StoreState.QUEUED if self._stores.put(job) else StoreState.QUEUE_FULL

    def _known_tokens(self, prefix: LoadedPrefix) -> int:
        """What need not be stored: all that matched, unless some of it was not there to load."""
        reuse = prefix.reuse
        wanted = self._grid.reusable_tokens(len(prefix.tokens), reuse.tokens_matched)
        return reuse.tokens_matched if reuse.tokens_loaded == wanted else reuse.tokens_loaded

    def _count(self, prefix: LoadedPrefix, state: StoreState) -> None:
        self._stats.add(
            PrefillStats(
                prefills=1,
                tokens_asked=len(prefix.tokens),
                tokens_loaded=prefix.reuse.tokens_loaded,
                bytes_loaded=prefix.reuse.bytes_loaded,
                load_failures=prefix.reuse.failure is not None and not prefix.reuse.weights_changed,
                weights_changed=prefix.reuse.weights_changed,
                stores_queued=state is StoreState.QUEUED,
                stores_refused=state is StoreState.QUEUE_FULL,
            )
        )

    def _count_store(self, done: Stored | None) -> None:
        if done is None:
            self._stats.add(PrefillStats(store_failures=1))
            return
        self._stats.add(
            PrefillStats(
                pages_stored=done.stored, pages_already=done.already, pages_dropped=done.dropped
            )
        )
