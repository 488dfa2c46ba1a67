"""The worker's half: fills blocks from the warehouse, and takes copies of blocks to be stored.

The engine's thread copies the blocks of a store to a ring, and waits only for loads that its step
needs; all that waits for the warehouse has threads of its own. One per rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.self_test import SelfTest
from kvwarehouse_connectors.core.store_queue import StoreQueue
from kvwarehouse_connectors.trtllm import arguments, compat, handshake, identity
from kvwarehouse_connectors.trtllm.counts import Counts
from kvwarehouse_connectors.trtllm.deferred_frees import DeferredFrees
from kvwarehouse_connectors.trtllm.loads import LoadOptions, Loads
from kvwarehouse_connectors.trtllm.messages import TrtllmStepMetadata
from kvwarehouse_connectors.trtllm.parts import Cache, layout_cache, pool_cache
from kvwarehouse_connectors.trtllm.settings import Settings

_log = logging.getLogger(__name__)

# At the engine's start only: it is then not serving anybody.
_START_WAIT_S = 3.0


class WorkerSide:
    """Raises UsageError where this engine cannot be served, naming why."""

    def __init__(self, llm_args: Any, settings: Settings) -> None:
        self._llm_args = llm_args
        self._settings = settings
        self._ranks = arguments.tensor_parallel(llm_args)
        self._rank = compat.rank()
        if not 0 <= self._rank < self._ranks:
            raise compat.unsupported(
                "this engine",
                f"gives this process rank {self._rank} of {self._ranks} (tensor_parallel_size)",
            )
        self._weights = identity.weights_fingerprint(llm_args, settings)
        self._connection = DaemonConnection(
            settings.address, ConnectionOptions(verify=settings.verify)
        )
        self.counts = Counts(f"rank {self._rank}")
        self._cache: Cache | None = None
        self._spaces: tuple[kvw.Namespace, ...] = ()
        self._barrier_space: kvw.Namespace | None = None
        self._answered = b""
        self._answering: threading.Thread | None = None
        self._checked: tuple[bytes, ...] = ()

    # -- once ----------------------------------------------------------------------------------

    def register_pool(self, tensor: Any) -> None:
        with self._ends_where_refused():
            problem = arguments.pool_problem(self._llm_args)
            if problem:
                raise compat.unsupported("this engine", problem)
            self._register(pool_cache(tensor, arguments.tokens_per_block(self._llm_args)))

    def register_layout(self, layout: Any) -> None:
        with self._ends_where_refused():
            self._register(layout_cache(layout))

    @contextmanager
    def _ends_where_refused(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _register(self, cache: Cache) -> None:
        """The engine's cache, while no block of it is in use. Raises UsageError where blocks do not
        keep their bytes on the way."""
        settings = self._settings
        least = 2 * max(part.page_bytes for part in cache.parts)
        if settings.stores and settings.staging_bytes < least:
            raise kvw.UsageError(
                f"TLLM_KVW_STAGING_BYTES is {settings.staging_bytes}: no block of this model, of"
                f" {least // 2} bytes, could be stored. Use {least} or more; the default is 256MiB",
                code="bad_setting",
            )
        spaces = identity.namespaces(self._llm_args, cache, self._weights, settings)
        self_test = SelfTest(self._connection, stores=settings.stores)
        for part in cache.parts:
            if not self_test.round_trip(part.memory, range(part.slots)[-2:]):
                raise compat.unsupported(
                    "this engine", "gets other bytes back than it stored (self-test)"
                )
        self._close_ways()  # of a cache that this one takes the place of
        self._cache, self._spaces = cache, spaces
        self._barrier_space = identity.barrier_space(spaces, self._ranks)
        self._loads = Loads(
            self._connection,
            self_test,
            list(zip(cache.parts, spaces, strict=True)),
            LoadOptions(self._rank, settings.load_timeout_s),
            self.counts,
        )
        self._store_queue = StoreQueue(self._connection, settings, self._rank, self._stored)
        # A quarter of the ring: while one piece is on its way the next is copied.
        pieces = [max(1, settings.staging_bytes // 4 // part.page_bytes) for part in cache.parts]
        self._deferred_frees = DeferredFrees(self._copy_held, pieces, settings.hold_s, self.counts)
        for space in (*spaces, self._barrier_space):
            try:
                self._connection.wait_namespace(space, _START_WAIT_S)
            except kvw.UsageError:
                break  # refused, and said so in the log: the engine computes
        if self._rank == 0:
            cache_info = handshake.TrtllmCacheInfo(
                cache.groups, spaces, self._barrier_space, cache.block_tokens, cache.pool
            )
            handshake.publish(self._llm_args, cache_info)
        _log.info("kvwarehouse: namespaces %s", ", ".join(s.id.hex() for s in spaces))

    # -- each step ---------------------------------------------------------------------------

    def start_loads(self, metadata: TrtllmStepMetadata) -> None:
        """Before the step's forward pass. Raises RuntimeError where a promised load does not come,
        UsageError where ranks differ."""
        if self._cache is None:
            return
        self._check_spaces(metadata)
        self._answer(metadata.barrier_key)
        self._deferred_frees.ordered(metadata.saves)
        self._loads.begin(metadata.loads)

    def take_copies(self, metadata: TrtllmStepMetadata) -> None:
        """After the forward pass: copies the blocks to be stored; the engine may write them again
        when this returns."""
        if self._cache is None:
            return
        for place in range(len(self._cache.parts)):
            runs = [run for run in metadata.stores if run.group == place]
            if runs and not self._copy(runs):
                self.counts.add("dropped_blocks", sum(len(run.blocks) for run in runs))
        self.counts.log()

    def finished(
        self, saving: Sequence[int], loading: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Requests that need not be held any more, and those whose loads are over; of those handed
        in here, each once. Raises RuntimeError where a promised load does not come."""
        if self._cache is None:
            return list(saving), []
        return self._deferred_frees.finished(saving), self._loads.finished(loading)

    def close(self) -> None:
        """Ends the threads: loads under way end by their own bounds, stores that are queued are
        made within their timeout."""
        self._close_ways()
        if self._answering is not None:
            self._answering.join(2 * self._settings.store_timeout_s)
        self._connection.close()
        self.counts.log(now=True)

    def _close_ways(self) -> None:
        if self._cache is not None:
            self._loads.close()
            self._store_queue.close()

    # -- inside ----------------------------------------------------------------------------------

    def _check_spaces(self, metadata: TrtllmStepMetadata) -> None:
        if metadata.spaces in ((), self._checked):
            return
        own = tuple(space.id for space in self._spaces)
        if metadata.spaces != own:
            raise kvw.UsageError(
                f"rank {self._rank} has KV of the kinds {[s.hex() for s in own]}, rank 0 of"
                f" {[s.hex() for s in metadata.spaces]}: other weights, layouts, versions or"
                " settings. Start all ranks alike",
                code="unsupported",
            )
        self._checked = metadata.spaces

    def _copy(self, runs: list[PageRun]) -> bool:
        """Whether the blocks, all of one part, are copied, or need not be: what every rank has
        alike is stored by the first."""
        assert self._cache is not None
        place = runs[0].group
        part = self._cache.parts[place]
        if part.replicated and self._rank:
            return True
        return self._store_queue.put(runs, self._spaces[place], part.memory)

    def _copy_held(self, run: PageRun) -> bool:
        try:
            return self._copy([run])
        except Exception:  # noqa: BLE001 - the engine's edge: the hold ends with its time
            _log.exception("kvwarehouse: blocks of a finished request could not be copied")
            return False

    def _stored(self, runs: list[PageRun], result: kvw.StoreResult) -> None:
        """In the storing thread."""
        self.counts.add("stored_blocks", result.stored)
        self.counts.add("already_blocks", result.already)
        self.counts.add("dropped_blocks", result.dropped_pages)

    def _answer(self, key: bytes) -> None:
        """Says that this rank is ready, in a thread of its own."""
        if not key or key == self._answered:
            return
        if self._answering is not None and self._answering.is_alive():
            return  # a later step asks again
        self._answering = threading.Thread(
            target=self._say_present, args=(key,), name="kvw-answer", daemon=True
        )
        self._answering.start()

    def _say_present(self, key: bytes) -> None:
        """Stores this rank's shard of the page that is complete when all ranks have."""
        assert self._barrier_space is not None
        try:
            opened = [
                self._connection.namespace(space) for space in (*self._spaces, self._barrier_space)
            ]
            if None in opened or self._connection.control() is None:
                return
            page = np.zeros((1, self._barrier_space.page_bytes), np.uint8)
            result = opened[-1].store(  # type: ignore[union-attr]  # none is None
                keys=[kvw.KeyRun([key])],
                pages=page,
                shard=self._rank,
                timeout_s=self._settings.store_timeout_s,
            )
            if result.stored or result.already:
                self._answered = key
        except kvw.WarehouseError as error:
            self._connection.call_failed(self._barrier_space, error)
            _log.debug("this rank could not say that it is ready: %s", error)
        except Exception:  # noqa: BLE001 - a thread's edge: nothing is loaded meanwhile
            _log.exception("kvwarehouse: this rank could not say that it is ready")
