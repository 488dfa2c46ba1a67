"""A connector tests itself before it serves.

The round trip: known bytes go through the engine's own blocks and the warehouse, and have to come
back the same. Where no daemon is there at the start, the first load makes it, in the blocks that
the engine gave for it. The layout: what the engine wrote into its blocks has to be what is gathered
from them, and what is scattered what the engine reads.

Thread-safe after registration.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.core.device_copies import may_still_write
from kvwarehouse_connectors.core.memory import BlockMemory
from kvwarehouse_connectors.core.page_run import PageRun

_log = logging.getLogger(__name__)

_TIMEOUT_S = 0.5
_BLOCKS = 2
# Where it could not be made: a daemon that is full or gone must not cost every load another try.
_MOST_TRIES = 3


class SelfTest:
    """stores: whether this engine may store. One that may not cannot make the round trip: only the
    digests of each load check its bytes."""

    def __init__(self, connection: DaemonConnection, *, stores: bool) -> None:
        self._connection = connection
        self._stores = stores
        self._lock = threading.Lock()
        self._verdicts: dict[int, bool] = {}
        self._tries: dict[int, int] = {}

    def round_trip(self, memory: BlockMemory, blocks: Sequence[int]) -> bool:
        """False where bytes of these blocks, which hold nothing yet, do not survive being stored
        and loaded. Made once for each memory; where it cannot be made now it counts as passed, and
        is tried again a few times. Blocks for three calls of the daemon."""
        if not self._stores:
            return True
        with self._lock:
            verdict = self._verdicts.get(id(memory))
            tries = self._tries.get(id(memory), 0)
            if verdict is None and tries < _MOST_TRIES:
                self._tries[id(memory)] = tries + 1
                verdict = self._try(memory, list(blocks[:_BLOCKS]))
                if verdict is not None:
                    self._verdicts[id(memory)] = verdict
        return verdict is not False

    def _try(self, memory: BlockMemory, blocks: list[int]) -> bool | None:
        client = self._connection.client
        if client is None or self._connection.control() is None:
            return None
        shape = (len(blocks), memory.block_bytes)
        before = np.zeros(shape, np.uint8)
        memory.gather(blocks, before)
        memory.settle()
        rows = np.frombuffer(os.urandom(shape[0] * shape[1]), np.uint8).reshape(shape)
        ours = True
        try:
            space = client.open(_space(memory.block_bytes), reopen=False)
            run = PageRun(0, [os.urandom(32) for _ in blocks], blocks, False)
            memory.scatter(blocks, rows)
            stored = _store(memory, space, run)
            # A store and a load that confuse the same places agree with each other.
            kept = np.zeros(shape, np.uint8)
            read = space.load(keys=run.key_runs(), out=kept, timeout_s=_TIMEOUT_S)
            memory.scatter(blocks, np.zeros(shape, np.uint8))
            loaded = memory.load(space, run, 0, 0, _TIMEOUT_S)
            back = np.zeros(shape, np.uint8)
            memory.gather(blocks, back)
            memory.settle()
        except kvw.WarehouseError as error:
            if may_still_write(error):
                ours = False
                raise
            _log.debug("the self-test could not be made: %s", error)
            return None
        finally:
            # Random bytes may be NaN, and attention reads a block's unused end: 0 * NaN is NaN.
            if ours:
                memory.scatter(blocks, before)
        if min(stored.stored, int(read), int(loaded)) < len(blocks):
            return None  # no room, or evicted at once: it says nothing
        if np.array_equal(rows, back) and np.array_equal(rows, kept):
            return True
        _log.error(
            "the self-test of %d-byte blocks came back with other bytes: nothing is loaded. Please"
            " report this with the engine's version, device and layout",
            memory.block_bytes,
        )
        return False


def _store(memory: BlockMemory, space: kvw.OpenNamespace, run: PageRun) -> kvw.StoreResult:
    """As the store queue stores."""
    if not memory.copies_on_device:
        rows = np.zeros((len(run.blocks), memory.block_bytes), np.uint8)
        memory.gather(run.blocks, rows)
        memory.settle()
        return space.store(keys=run.key_runs(), pages=rows, timeout_s=_TIMEOUT_S)
    try:
        pages = memory.copy(run.blocks)
        return space.store(keys=run.key_runs(), pages=pages, timeout_s=_TIMEOUT_S)
    except kvw.WarehouseError as error:
        memory.store_failed(error)
        raise


def _space(page_bytes: int) -> kvw.Namespace:
    return kvw.Namespace(
        model="kvwarehouse/self-test",
        weights="none",
        dtype="uint8",
        layout="self-test/1",
        page_tokens=1,
        page_bytes=page_bytes,
        hash_scheme="random",
    )


class EngineBlocks(Protocol):
    """The blocks of a test as the engine itself reads and writes them, by its own means."""

    def write_noise(self) -> None: ...
    def clear(self) -> None: ...
    def hold_noise(self) -> bool:
        """Whether they hold what write_noise wrote, and what is beside them is as it was."""
        ...

    def restore(self) -> None:
        """Writes what they held before the test."""
        ...


def layout_keeps_bytes(
    engine: EngineBlocks,
    gather: Callable[[], NDArray[np.uint8]],
    scatter: Callable[[NDArray[np.uint8]], None],
) -> bool:
    """Whether what the engine wrote is what is gathered, and what is scattered is what the engine
    reads. The engine's blocks are as before, whatever comes of it."""
    try:
        engine.write_noise()
        rows = gather()
        engine.clear()
        scatter(rows)
        return engine.hold_noise()
    finally:
        engine.restore()
