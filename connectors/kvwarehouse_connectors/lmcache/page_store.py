"""Chunks in the warehouse: which are there, holding, loading and storing them.

What the warehouse does is never raised, but counted. Each call ends by its deadline, a moment of
time.monotonic(). Chunks stand alone: LMCache does not say which comes before which.

Thread-safe.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.core.page_store import LOOKUP_KEYS, PageStore, ReasonCounts
from kvwarehouse_connectors.lmcache.batches import Batch
from kvwarehouse_connectors.lmcache.loading import Load

_log = logging.getLogger(__name__)

# A load looks so often whether the daemon lives, and whether LMCache still wants it.
_SLICE_S = 0.25
_STORE_SLICE_S = 1.0
# A namespace that is new here is registered in milliseconds; longer nobody waits for it.
_REGISTER_S = 1.0
# Of one load or store: what a load copies in one go is what an unlock may wait for.
_CALL_KEYS = 16_384
_CALL_BYTES = 256 << 20


class ChunkCounts(ReasonCounts):
    """For people: LMCache shows them in its /status. NAME_chunks of what was found, held (pinned)
    of these, loaded, not loaded (missed), stored, there already, and not stored (dropped);
    `missed.REASON` and `dropped.REASON` say why."""

    def __init__(self) -> None:
        super().__init__("chunks")


@dataclass(frozen=True)
class Found:
    """there: of each chunk. held: what keeps those of them that are in DRAM."""

    there: NDArray[np.bool_]
    held: list[kvw.Pins]


@dataclass(frozen=True)
class StoredBatch:
    """complete: all of it can be loaded now. written: chunks that were not there before."""

    complete: bool
    written: int


def _keys_of_call(batch: Batch) -> int:
    return max(1, min(_CALL_KEYS, _CALL_BYTES // batch.space.page_bytes))


class ChunkStore(PageStore):
    def __init__(self, connection: DaemonConnection, counts: ChunkCounts) -> None:
        super().__init__(connection)
        self._counts = counts

    def find(self, batch: Batch, until_s: float) -> Found:
        """What a load may expect now, held where it is in DRAM: what is on NVMe only comes while
        the daemon is alive, and is not held."""
        self._opened(batch.space, until_s)
        found = Found(np.zeros(len(batch), np.bool_), [])
        for begin in range(0, len(batch), LOOKUP_KEYS):
            rows = np.arange(begin, min(begin + LOOKUP_KEYS, len(batch)))
            part = batch.take(rows)
            tiers = self._tiers(batch.space, part, counted=True)
            found.there[rows] = self._reachable(tiers)
            near = np.flatnonzero(kvw.Tier.near(tiers))
            held = self._hold(part.take(near))
            found.held.extend(held)
        there = int(found.there.sum())
        self._counts.add(found_chunks=there, held_chunks=sum(pins.pages for pins in found.held))
        return found

    def load(self, batch: Batch, load: Load, until_s: float) -> NDArray[np.bool_]:
        """Of each chunk whether its memory holds it now, verified. Other memory may hold anything.
        Writes inside `load.writing` alone."""
        done = np.zeros(len(batch), np.bool_)
        self._opened(batch.space, until_s)
        rest = np.arange(len(batch))
        while len(rest):
            left = max(0.0, until_s - time.monotonic()) if self.alive else 0.0
            part = rest[: _keys_of_call(batch)]
            loaded = self._load_once(batch.take(part), load, min(left, _SLICE_S))
            if loaded is None:
                self._counts.why("missed", {"given_up": len(rest)})
                break
            done[rest[:loaded]] = True
            rest = rest[loaded:]
            waits = "timeout" in loaded.missed and left > _SLICE_S
            if loaded < len(part) and not waits:
                reason = next(iter(loaded.missed), "missing")
                rest = self._after_miss(batch, rest, reason, waits=left > _SLICE_S)
        self._counts.add(loaded_chunks=int(done.sum()))
        return done

    def store(self, batch: Batch, until_s: float) -> StoredBatch:
        """Of what was not stored, by whatever reason, counts what can be loaded now."""
        self._opened(batch.space, until_s)
        stored, dropped = 0, 0
        step = _keys_of_call(batch)
        for begin in range(0, len(batch), step):
            part = batch.take(np.arange(begin, min(begin + step, len(batch))))
            result = self._store_part(part, until_s)
            self._counts.add(stored_chunks=result.stored, already_chunks=result.already)
            self._counts.why("dropped", result.dropped)
            stored += result.stored
            dropped += result.dropped_pages
        there = not dropped or bool(
            self._reachable(self._tiers(batch.space, batch, counted=False)).all()
        )
        return StoredBatch(there, stored)

    def _store_part(self, batch: Batch, until_s: float) -> kvw.StoreResult:
        """Waits for a busy daemon a while at a time, so that one that stops is noticed."""
        stored = 0
        while True:
            began = time.monotonic()
            left = until_s - began
            if left <= 0 or not self.alive:
                reason = "timeout" if left <= 0 else "unreachable"
                return kvw.StoreResult(stored, 0, {reason: len(batch) - stored})
            result = self._store(batch.space, batch, batch.regions, min(left, _STORE_SLICE_S))
            already = max(0, result.already - stored)
            stored += result.stored
            if not result.dropped or time.monotonic() - began < _STORE_SLICE_S:
                return kvw.StoreResult(stored, already, result.dropped)

    def _opened(self, space: kvw.Namespace, until_s: float) -> None:
        """Waits until a namespace that is new here is registered, at a daemon that lives."""
        if self._connection.namespace(space) is not None or not self.alive:
            return
        try:
            self._connection.wait_namespace(
                space, min(_REGISTER_S, max(0.0, until_s - time.monotonic()))
            )
        except kvw.UsageError as error:  # logged by the connection when it was refused
            _log.debug("kvwarehouse: %s", error)

    def _hold(self, batch: Batch) -> list[kvw.Pins]:
        """Pins of what is in DRAM still. Over the budget of pins chunks go unheld, and may be gone
        when they are loaded."""
        held: list[kvw.Pins] = []
        rest = np.arange(len(batch))
        while len(rest):
            pins = self._pin(batch.space, batch.take(rest))
            if pins is None:
                break
            if pins.pages:
                held.append(pins)
            rest = rest[pins.pages + 1 :]  # the one between left DRAM since
        return held

    def _load_once(self, batch: Batch, load: Load, timeout_s: float) -> kvw.Loaded | None:
        """None where LMCache has taken the memory back."""
        answers: list[kvw.Loaded] = []

        def write() -> None:
            answers.append(self._load(batch.space, batch, batch.regions, timeout_s))

        return answers[0] if load.writing(write) else None

    def _after_miss(
        self, batch: Batch, rest: NDArray[np.int64], reason: str, *, waits: bool
    ) -> NDArray[np.int64]:
        """What to go on with: the first of `rest` did not come, for that reason, nor will those
        that are not there. waits: whether there is time for those that are not in DRAM."""
        further = rest[1:]
        there = np.zeros(len(further), np.bool_)
        for begin in range(0, len(further), LOOKUP_KEYS):
            rows = further[begin : begin + LOOKUP_KEYS]
            tiers = self._tiers(batch.space, batch.take(rows), counted=False)
            near = kvw.Tier.near(tiers)
            there[begin : begin + len(rows)] = self._reachable(tiers) if waits else near
        gone = int((~there).sum())
        self._counts.why("missed", {reason: 1})
        self._counts.why("missed", {"missing" if waits else "timeout": gone} if gone else {})
        return further[there]
