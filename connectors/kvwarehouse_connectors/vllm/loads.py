"""Loads of requests: blocks are filled from the warehouse by threads of their own.

Whatever happens to a load, it is reported once, and only when nothing writes its blocks any more:
the engine waits for that, and then uses them for what it likes. If a device hangs, that is never.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.core.device_copies import may_still_write
from kvwarehouse_connectors.core.load_policy import Schedule
from kvwarehouse_connectors.core.loading import LoadResult, load_in_time
from kvwarehouse_connectors.core.memory import BlockMemory
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.self_test import SelfTest
from kvwarehouse_connectors.vllm.messages import LoadOrder
from kvwarehouse_connectors.vllm.results import Results

_log = logging.getLogger(__name__)

# Loads side by side. Those that wait for NVMe have threads of their own: they must not keep out
# what only has to be copied.
_COPIERS = 2
_WAITERS = 16
# A load of so much from DRAM alone is made in two halves by two threads: one does not reach what
# the memory delivers.
_HALVED_BYTES = 4 << 20
# Of computing a prefix: how long a load that is of use only as a whole may take.
_WHOLE_SHARE = 0.5
_HANGS = (
    "request %s waits for ever, and so do others: the device may still write to the blocks of its"
    " load, so that nobody else may have them. Start the engine again. %s"
)
# A load's bytes below this say nothing of a tier's speed.
_TELLING_BYTES = 1 << 20


@dataclass(frozen=True)
class LoadOptions:
    """whole: whether a part of a load is of no use. shard: this rank's. timeout_s: of one load."""

    whole: bool
    shard: int
    timeout_s: float


class Loads:
    """memories, spaces: one for each group; they may be filled in until the first order."""

    def __init__(
        self,
        connection: DaemonConnection,
        self_test: SelfTest,
        memories: Sequence[BlockMemory],
        results: Results,
        options: LoadOptions,
    ) -> None:
        self._connection = connection
        self._self_test = self_test
        self._memories = memories
        self._results = results
        self._options = options
        self._spaces: tuple[kvw.Namespace, ...] = ()
        self._copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="kvw-copy")
        self._waiters = ThreadPoolExecutor(_WAITERS, thread_name_prefix="kvw-wait")
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="kvw-half")
        self._helper_free = threading.Semaphore()

    def begin(
        self,
        order: LoadOrder,
        spaces: tuple[kvw.Namespace, ...],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """In the engine's thread, which goes on at once. wanted: asked in the loading thread, when
        the device has come to this step, whether it is to be made after all."""
        self._spaces = spaces
        try:
            for memory in self._memories:
                memory.after_engine()
            pool = self._waiters if order.from_nvme else self._copiers
            pool.submit(self._load, order, time.monotonic(), wanted)
        except Exception:  # noqa: BLE001 - the engine's edge; it waits for this load
            _log.exception("kvwarehouse: a load could not be begun")
            self.report(order, [])

    def close(self) -> None:
        """Loads under way end by their own bounds."""
        for pool in (self._copiers, self._waiters, self._helper):
            pool.shutdown(wait=True, cancel_futures=True)

    def report(self, order: LoadOrder, results: Sequence[LoadResult]) -> None:
        """results: of the order's first runs; the others were not tried."""
        bad: list[int] = []
        loaded = loaded_bytes = 0
        for place, run in enumerate(order.runs):
            pages = results[place].pages if place < len(results) else 0
            bad += run.blocks[pages:]
            loaded += pages
            loaded_bytes += pages * self._memories[run.group].block_bytes
            self._clear(run, pages)
        seconds = sum(result.seconds for result in results)
        # What was given up says most of NVMe: how slow it is.
        telling = loaded_bytes >= _TELLING_BYTES or (order.from_nvme and bad)
        if telling and seconds > 0 and not order.from_remote:
            rate = max(loaded_bytes, 1) / seconds
            self._results.delivered(rate, from_nvme=order.from_nvme)
        self._results.count(loaded_blocks=loaded, missed_blocks=len(bad), loaded_bytes=loaded_bytes)
        self._results.ended(
            order.request_id,
            complete=not bad and not order.refused,
            whole=self._options.whole or order.refused,
            bad=bad,
        )

    # -- in the loading threads ----------------------------------------------------------------

    def _load(self, order: LoadOrder, begin_s: float, wanted: Callable[[], bool]) -> None:
        """One request's load, from begin to report. begin_s: when it was ordered, from where on its
        schedule counts."""
        results: list[LoadResult] = []
        try:
            # What the engine has queued is no part of a load's time: until it is done, nobody could
            # compute these blocks either.
            begin_s += self._engine_done(order)
            for run in order.runs if wanted() else ():
                results.append(self._load_run(order, run, begin_s))
                if results[-1].pages < len(run.blocks):
                    break
        except Exception as error:  # noqa: BLE001 - a thread's edge: what did not come is computed
            if may_still_write(error):
                _log.error(_HANGS, order.request_id, error)
                return
            for space in self._spaces:
                self._connection.call_failed(space, error)
            level = logging.DEBUG if isinstance(error, kvw.WarehouseError) else logging.ERROR
            _log.log(level, "a load failed: %s: %s", type(error).__name__, error)
        self.report(order, results)

    def _engine_done(self, order: LoadOrder) -> float:
        """The seconds until the engine had done what it had queued when a load was ordered."""
        waited_s = 0.0
        for group in dict.fromkeys(run.group for run in order.runs):
            seconds = self._memories[group].engine_done(self._options.timeout_s)
            if seconds is None:
                raise kvw.StorageError(
                    f"the engine's stream has not come to the blocks of {order.request_id} within"
                    f" {self._options.timeout_s:g} s (load_timeout_s)",
                    code="engine_busy",
                )
            waited_s += seconds
        return waited_s

    def _load_run(self, order: LoadOrder, run: PageRun, begin_s: float) -> LoadResult:
        pages = len(run.blocks)
        opened = self._connection.wait_namespace(self._spaces[run.group], self._options.timeout_s)
        if opened is None:
            return LoadResult(0, 0.0, {"unreachable": pages})
        memory = self._memories[run.group]
        if not self._self_test.round_trip(memory, run.blocks):
            return LoadResult(0, 0.0, {"self_test": pages})
        schedule, most_s = self._schedule(order, run)

        def load(begin: int, end: int) -> LoadResult:
            part = run.cut(begin, end)
            return load_in_time(
                lambda first, timeout_s: memory.load(
                    opened, part, first, self._options.shard, timeout_s
                ),
                end - begin,
                schedule.after(begin),
                most_s,
                begin_s=begin_s,
            )

        large = pages > 1 and pages * memory.block_bytes >= _HALVED_BYTES
        if large and memory.takes_loads_at_once and not order.from_nvme:
            return self._halved(load, pages)
        return load(0, pages)

    def _halved(self, load: Callable[[int, int], LoadResult], pages: int) -> LoadResult:
        """load(begin, end) in two halves, the second in a thread that helps where it is free."""
        if not self._helper_free.acquire(blocking=False):
            return load(0, pages)
        middle = pages // 2
        try:
            second = self._helper.submit(load, middle, pages)
            try:
                first = load(0, middle)
            finally:
                wait([second])  # until then it writes blocks
        finally:
            self._helper_free.release()
        return first.then(second.result(), middle)

    def _schedule(self, order: LoadOrder, run: PageRun) -> tuple[Schedule, float]:
        """By when pages of a run are due, and the whole load. Where a part is of no use, there is
        one bound for all."""
        most_s = self._options.timeout_s
        if not order.page_compute_s:
            return Schedule(0.0, most_s), most_s
        if not self._options.whole:
            return Schedule.of(len(run.blocks), order.page_compute_s), most_s
        computing_s = order.page_compute_s * len(order.runs[0].blocks)
        most_s = min(most_s, _WHOLE_SHARE * computing_s)
        return Schedule(0.0, most_s), most_s

    def _clear(self, run: PageRun, pages: int) -> None:
        """Zeroes the blocks that did not come: a load may have left bytes in them that failed their
        check, which can be NaN, and attention reads a block's unused end."""
        memory = self._memories[run.group]
        zeros = np.zeros((1, memory.block_bytes), np.uint8)
        try:
            for block in run.blocks[pages:]:
                memory.scatter([block], zeros)
        except Exception:  # noqa: BLE001 - a thread's edge: the report must be made
            _log.exception("kvwarehouse: blocks of a failed load could not be cleared")
