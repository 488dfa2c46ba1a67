"""Pages are verified before they are promised: TensorRT-LLM has no way to hear of a failed load.

In a lookup as many as its time allows; the others, and those on NVMe, by a thread of its own for
the next request. A page counts as verified for a while. This narrows the chance that a promise is
broken; the load itself verifies every page again, so it can never deliver other bytes.

`check` is for the scheduler's thread alone, and makes no call. Close ends the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_connectors.core.page_run import PageRun

_log = logging.getLogger(__name__)

# What is verified at once; and how fast that is believed to be before it is begun. A core that
# copies and digests does three times as much.
_BATCH_BYTES = 2 << 20
_BYTES_PER_S = 4e9
_KEPT_S = 60.0
_MOST_KEPT = 1 << 16
_MOST_QUEUED = 64
# Of one run in the background, with its reads from NVMe.
_PATIENCE_S = 5.0

_Name = tuple[bytes, bytes]


class VerifiedPages:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Name, float] = OrderedDict()
        self._queue: deque[tuple[kvw.OpenNamespace, PageRun]] = deque()
        self._queued: set[_Name] = set()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvw-verify", daemon=True)
        self._thread.start()

    def check(self, opened: kvw.OpenNamespace, run: PageRun, end_s: float) -> int:
        """How many of the run's pages, in order, are verified now or lately; nothing is begun that
        would not end by end_s (time.monotonic)."""
        done = self._known(opened, run.keys, 0)
        each_bytes = opened.space.page_bytes * opened.space.shards
        batch = max(1, _BATCH_BYTES // each_bytes)
        while done < len(run.keys):
            pages = min(batch, len(run.keys) - done)
            if time.monotonic() + pages * each_bytes / _BYTES_PER_S > end_s:
                break
            good = self._load(opened, run.cut(done, done + pages), 0.0)
            if good < pages:
                return done + good
            done = self._known(opened, run.keys, done + pages)
        return done

    def later(self, opened: kvw.OpenNamespace, run: PageRun) -> None:
        """Verifies the run in the background, and brings it to DRAM. Beyond the bound of the queue
        it is forgotten: a later lookup asks again."""
        if not run.keys:
            return
        name = (opened.space.id, run.keys[0])
        with self._changed:
            if name in self._queued or len(self._queue) >= _MOST_QUEUED:
                return
            self._queued.add(name)
            self._queue.append((opened, run))
            self._changed.notify()

    def forget(self) -> None:
        with self._lock:
            self._kept.clear()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(2 * _PATIENCE_S)

    # -- inside --------------------------------------------------------------------------------

    def _known(self, opened: kvw.OpenNamespace, keys: Sequence[bytes], done: int) -> int:
        """The first page from `done` on that was not verified lately."""
        now = time.monotonic()
        with self._lock:
            while done < len(keys) and self._kept.get((opened.space.id, keys[done]), 0.0) > now:
                done += 1
        return done

    def _load(self, opened: kvw.OpenNamespace, run: PageRun, timeout_s: float) -> int:
        """Pages of the run that are right on every shard. Their bytes go to one page of memory, one
        after another: what counts is their digest."""
        good = len(run.keys)
        scratch = np.empty((1, opened.space.page_bytes), np.uint8)
        for shard in range(opened.space.shards):
            if not good:
                break
            out = kvw.Regions.strided(
                [scratch],
                [scratch.ctypes.data],
                [0],
                [opened.space.page_bytes],
                np.zeros((good, 1), np.int64),
            )
            loaded = opened.load(
                keys=run.cut(0, good).key_runs(), out=out, shard=shard, timeout_s=timeout_s
            )
            good = int(loaded)
        until = time.monotonic() + _KEPT_S
        with self._lock:
            for key in run.keys[:good]:
                self._kept[opened.space.id, key] = until
                self._kept.move_to_end((opened.space.id, key))
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return good

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                opened, run = self._queue.popleft()
            try:
                self._in_pieces(opened, run)
            except Exception as error:  # noqa: BLE001 - a thread's edge: the next lookup asks again
                level = logging.DEBUG if isinstance(error, kvw.WarehouseError) else logging.ERROR
                _log.log(level, "pages could not be verified: %s: %s", type(error).__name__, error)
            with self._lock:
                self._queued.discard((opened.space.id, run.keys[0]))

    def _in_pieces(self, opened: kvw.OpenNamespace, run: PageRun) -> None:
        end_s = time.monotonic() + _PATIENCE_S
        each_bytes = opened.space.page_bytes * opened.space.shards
        batch = max(1, 16 * _BATCH_BYTES // each_bytes)
        done = 0
        while done < len(run.keys) and not self._closed:
            pages = min(batch, len(run.keys) - done)
            left_s = end_s - time.monotonic()
            if left_s <= 0 or self._load(opened, run.cut(done, done + pages), left_s) < pages:
                return
            done += pages
