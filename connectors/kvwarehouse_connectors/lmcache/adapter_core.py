"""The warehouse as LMCache asks for it: stores, lookups that lock, loads, unlocks; none blocks.

Each call is answered exactly once, by `answer`, in a thread of this or, where it is refused, in the
caller's. Queues and threads are bounded, and every call has a deadline that counts from here: what
waits longer is answered without touching LMCache's memory, which may by then be used for others.

Thread-safe. Only `close` blocks. After it nothing touches LMCache's memory, and calls that were not
answered never are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.lmcache.batches import ChunkFilter
from kvwarehouse_connectors.lmcache.chunks import ChunkLayout, ObjectKey
from kvwarehouse_connectors.lmcache.identity import Spaces, weights_of
from kvwarehouse_connectors.lmcache.loading import Load, Loading
from kvwarehouse_connectors.lmcache.locks import Held, Locks
from kvwarehouse_connectors.lmcache.page_store import ChunkCounts, ChunkStore
from kvwarehouse_connectors.lmcache.settings import Settings
from kvwarehouse_connectors.lmcache.workers import Workers

_log = logging.getLogger(__name__)

# One that waits for the disk must not hold those whose chunks are in DRAM.
_LOAD_THREADS = 2
_MOST_WAITING = 256
# Lookups read shared memory; one that is older was in line behind others for too long.
_LOOKUP_S = 2.0
# What a native call may take beyond its own timeout.
_CLOSE_S = 5.0

Answer = Callable[[NDArray[np.bool_]], None]


@dataclass(frozen=True)
class StoreAnswer:
    """complete: all chunks are there now. size_bytes: of those written for it."""

    complete: bool
    size_bytes: int = 0


class AdapterCore:
    """version: of LMCache. Blocks for reading the weights' files, and for a daemon that is there.
    Raises UsageError where the settings are not enough to serve anything. A daemon need not be
    there."""

    def __init__(self, settings: Settings, version: str) -> None:
        self._settings = settings
        self._filter = ChunkFilter(Spaces(weights_of(settings), settings.salt, version))
        self._counts = ChunkCounts()
        self._connection = DaemonConnection(
            settings.address,
            ConnectionOptions(verify=settings.verify, read_only=not settings.stores),
        )
        self._chunk_store = ChunkStore(self._connection, self._counts)
        self._locks = Locks(settings.lock_timeout_s)
        self._loading = Loading()
        self._queued_bytes = 0
        self._queue_lock = threading.Lock()
        self._stores = Workers("store", 1, _MOST_WAITING)
        self._lookups = Workers("lookup", 1, _MOST_WAITING, self._expire)
        self._loads = Workers("load", _LOAD_THREADS, _MOST_WAITING)

    # -- LMCache's calls ---------------------------------------------------------------------------

    def store(
        self,
        keys: Sequence[ObjectKey],
        memory: Sequence[Any],
        answer: Callable[[StoreAnswer], None],
    ) -> None:
        """memory: LMCache's objects, which stay until the answer."""
        until = time.monotonic() + self._settings.store_timeout_s
        size = sum(one.get_size() for one in memory)
        if not self._settings.stores:
            self._refuse_store(keys, "read_only", answer)
            return
        if not self._enqueue(size):
            self._refuse_store(keys, "queue_full", answer)
            return

        def work() -> None:
            stored = StoreAnswer(False)
            try:
                stored = self._store(keys, memory, until)
            finally:
                self._enqueue(-size)
                answer(stored)

        if not self._stores.submit(work):
            self._enqueue(-size)
            self._refuse_store(keys, "queue_full", answer)

    def lookup(
        self, keys: Sequence[ObjectKey], layouts: Mapping[int, ChunkLayout], answer: Answer
    ) -> None:
        """layouts: of each object group. Of each chunk whether it is there; those are locked."""
        until = time.monotonic() + _LOOKUP_S
        nothing = np.zeros(len(keys), np.bool_)

        def work() -> None:
            found = nothing
            self._expire()  # with one lookup after the other nobody is idle
            try:
                if time.monotonic() < until:
                    found = self._lookup(keys, layouts, until)
            finally:
                answer(found)

        if not self._settings.loads or not self._lookups.submit(work):
            answer(nothing)

    def load(self, keys: Sequence[ObjectKey], memory: Sequence[Any], answer: Answer) -> None:
        """memory: LMCache's objects, which stay until the answer, or until their keys are unlocked.
        Of each whether it was filled."""
        until = time.monotonic() + self._settings.load_timeout_s
        nothing = np.zeros(len(keys), np.bool_)
        load = self._loading.begin(keys)

        def work() -> None:
            loaded = nothing
            try:
                if time.monotonic() < until:
                    loaded = self._load(keys, memory, load, until)
                else:
                    self._counts.why("missed", {"timeout": len(keys)})
            finally:
                self._loading.done(load)
                answer(loaded)

        if not self._settings.loads or not self._loads.submit(work):
            self._loading.done(load)
            self._counts.why("missed", {"queue_full": len(keys)})
            answer(nothing)

    def unlock(self, keys: Sequence[ObjectKey]) -> None:
        """Each once. Where a load of them is under way LMCache has given it up: it ends now, which
        is the one thing here that may take a moment."""
        self._locks.give_back(keys)
        self._loading.end_uncovered(keys, self._locks.count)

    # -- the rest ------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Plain values. is_healthy: a daemon is there, and all threads live. LMCache goes on
        without both."""
        workers = (self._stores, self._lookups, self._loads)
        connected = self._chunk_store.alive
        return {
            "is_healthy": connected and all(one.alive for one in workers),
            "address": self._settings.address,
            "connected": connected,
            "problem": ""
            if connected
            else self._connection.problem or "the daemon does not answer",
            "locked_chunks": self._locks.total,
            "queued_store_bytes": self._queued_bytes,
            "queued": {
                "store": workers[0].waiting,
                "lookup": workers[1].waiting,
                "load": workers[2].waiting,
            },
            "totals": self._counts.totals(),
        }

    def close(self) -> None:
        self._loading.end_all()
        ended = [
            self._loads.close(_CLOSE_S),
            self._lookups.close(_CLOSE_S),
            self._stores.close(self._settings.store_timeout_s + _CLOSE_S),
        ]
        if not all(ended):
            _log.error("kvwarehouse: a call goes on although LMCache closes its L2")
        self._locks.clear()
        self._connection.close()
        _log.info("kvwarehouse: closed after %s", self._counts.totals())

    # -- within, in the workers' threads ---------------------------------------------------------

    def _store(
        self, keys: Sequence[ObjectKey], memory: Sequence[Any], until_s: float
    ) -> StoreAnswer:
        if time.monotonic() >= until_s:
            self._counts.why("dropped", {"timeout": len(keys)})
            return StoreAnswer(False)
        batches = self._filter.with_memory(keys, memory)
        left_out = len(keys) - sum(map(len, batches))
        self._counts.why("dropped", {"not_served": left_out} if left_out else {})
        complete, size = not left_out, 0
        for batch in batches:
            stored = self._chunk_store.store(batch, until_s)
            complete = complete and stored.complete
            size += stored.written * batch.space.page_bytes
        return StoreAnswer(complete, size)

    def _lookup(
        self, keys: Sequence[ObjectKey], layouts: Mapping[int, ChunkLayout], until_s: float
    ) -> NDArray[np.bool_]:
        there = np.zeros(len(keys), np.bool_)
        held: list[Held] = []
        for batch in self._filter.batches(keys, [layouts.get(key.object_group_id) for key in keys]):
            found = self._chunk_store.find(batch, until_s)
            there[batch.places] = found.there
            held.extend(found.held)
        self._locks.take([keys[place] for place in np.flatnonzero(there).tolist()], held)
        return there

    def _load(
        self, keys: Sequence[ObjectKey], memory: Sequence[Any], load: Load, until_s: float
    ) -> NDArray[np.bool_]:
        loaded = np.zeros(len(keys), np.bool_)
        for batch in self._filter.with_memory(keys, memory):
            loaded[batch.places] = self._chunk_store.load(batch, load, until_s)
        return loaded

    def _expire(self) -> None:
        ended = self._locks.expire()
        if ended:
            _log.warning(
                "kvwarehouse: %d locks of chunks ended, which LMCache did not give back in %.0f s",
                ended,
                self._settings.lock_timeout_s,
            )

    def _enqueue(self, size_bytes: int) -> bool:
        """Whether so much more may wait to be stored; a negative size always may."""
        with self._queue_lock:
            fits = self._queued_bytes + size_bytes <= self._settings.store_queue_bytes
            if fits or size_bytes < 0 or not self._queued_bytes:
                self._queued_bytes += size_bytes
                return True
            return False

    def _refuse_store(
        self, keys: Sequence[ObjectKey], reason: str, answer: Callable[[StoreAnswer], None]
    ) -> None:
        self._counts.why("dropped", {reason: len(keys)})
        answer(StoreAnswer(False))
