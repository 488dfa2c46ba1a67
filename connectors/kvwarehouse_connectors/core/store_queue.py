"""Copies of blocks on their way to the warehouse: one thread, and a bound on their memory, which is
a ring on the host or a budget on the blocks' device.

`put` copies and returns; the store itself happens behind the engine's back. Pages of one step go
in one call for each group, so in one exchange with the daemon. While there is no daemon, what comes
is dropped at once: a store that waits would only keep out the next.

Thread-safe: the engine's thread puts, its own takes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.core.memory import BlockMemory
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.staging_ring import ByteBudget, StagingRing

_log = logging.getLogger(__name__)

# Of the storing thread: a tenth of a core's time beside a thread of the engine.
_NICER_BY = 10


class Bounds(Protocol):
    """Of a connector's settings: bytes of the ring, and of one store's time."""

    @property
    def staging_bytes(self) -> int: ...

    @property
    def store_timeout_s(self) -> float: ...


@dataclass(frozen=True)
class PendingStore:
    runs: list[PageRun]
    space: kvw.Namespace
    memory: BlockMemory
    pages: Any
    """Rows in the ring, or Regions in the memory of a device."""
    blocks: int
    give_back: Callable[[], None]
    wanted: Callable[[], bool]


class StoreQueue:
    """on_stored is called in the storing thread with runs and what became of them together."""

    def __init__(
        self,
        connection: DaemonConnection,
        settings: Bounds,
        shard: int,
        on_stored: Callable[[list[PageRun], kvw.StoreResult], None],
    ) -> None:
        self._connection = connection
        self._timeout_s = settings.store_timeout_s
        self._shard = shard
        self._on_stored = on_stored
        self._ring = StagingRing(settings.staging_bytes)
        self._device_budget = ByteBudget(settings.staging_bytes)
        self._queue: deque[PendingStore] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvw-store", daemon=True)
        self._thread.start()

    def put(
        self,
        runs: list[PageRun],
        space: kvw.Namespace,
        memory: BlockMemory,
        wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Copies the blocks of one step in one group, and queues them. False: there was no room,
        nothing is stored. wanted: asked in the storing thread, when the device has made the copies,
        whether they are to be stored after all."""
        blocks = [block for run in runs for block in run.blocks]
        copied = self._copied(blocks, memory)
        if copied is None:
            return False
        with self._changed:
            self._queue.append(
                PendingStore(runs, space, memory, copied[0], len(blocks), copied[1], wanted)
            )
            self._changed.notify()
        return True

    def _copied(
        self, blocks: list[int], memory: BlockMemory
    ) -> tuple[Any, Callable[[], None]] | None:
        """What a store reads, and what ends its use; None where there is no room."""
        if memory.copies_on_device:
            size = len(blocks) * memory.block_bytes
            if not self._device_budget.take(size):
                return None
            give_back = partial(self._device_budget.give_back, size)
            try:
                return memory.copy(blocks), give_back
            except kvw.CapacityError as error:
                _log.debug("blocks of a step are not stored: %s", error)
                give_back()
                return None
            except BaseException:
                give_back()
                raise
        rows = self._ring.take(len(blocks), memory.block_bytes)
        if rows is None:
            return None
        try:
            memory.gather(blocks, rows)
        except BaseException:
            self._ring.undo()
            raise
        return rows, self._ring.give_back

    def close(self) -> None:
        """Stores what is queued, for at most two timeouts, and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(2 * self._timeout_s)

    def _run(self) -> None:
        _make_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                pending = self._queue.popleft()
            try:
                result = self._store(pending)
            except Exception as error:  # noqa: BLE001 - a thread's edge: a lost store is a miss later
                self._connection.call_failed(pending.space, error)
                level = logging.DEBUG if isinstance(error, kvw.WarehouseError) else logging.ERROR
                _log.log(level, "a store failed: %s: %s", type(error).__name__, error)
                result = kvw.StoreResult(0, 0, {"unreachable": pending.blocks})
            runs, give_back = pending.runs, pending.give_back
            del pending  # before its room counts as free, the memory of its copy is
            give_back()
            self._on_stored(runs, result)

    def _store(self, pending: PendingStore) -> kvw.StoreResult:
        pending.memory.settle()
        if not pending.wanted():
            return kvw.StoreResult(0, 0, {"unwanted": pending.blocks})
        opened = self._connection.namespace(pending.space)
        if opened is None and self._connection.control() is not None:
            opened = self._connection.wait_namespace(pending.space, self._timeout_s)
        if opened is None or self._connection.control() is None:
            return kvw.StoreResult(0, 0, {"unreachable": pending.blocks})
        try:
            return opened.store(
                keys=[part for run in pending.runs for part in run.key_runs()],
                pages=pending.pages,
                # What every rank has alike is stored once.
                shard=self._shard if pending.space.shards > 1 else 0,
                timeout_s=self._timeout_s,
            )
        except kvw.WarehouseError as error:
            if isinstance(pending.pages, kvw.Regions):
                pending.memory.store_failed(error)
            raise


def _make_way() -> None:
    """On a CPU the engine computes with every core, and a step ends when its slowest thread does:
    this thread, whose work nobody waits for, takes what they leave."""
    thread = threading.get_native_id()
    with suppress(OSError):
        nicer = os.getpriority(os.PRIO_PROCESS, thread) + _NICER_BY
        os.setpriority(os.PRIO_PROCESS, thread, nicer)  # the kernel stops at 19
