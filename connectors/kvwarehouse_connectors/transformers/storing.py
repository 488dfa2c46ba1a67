"""Stores that happen behind the prompt's back: one thread, a bounded number of jobs.

The time to first token must not have a store in it. A job keeps the tensors alive that it reads, so
the bound is also one of memory: where it is reached, the newest job is refused, never waited for.

Thread-safe.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable

from kvwarehouse_connectors.transformers.transfer import Stored

_log = logging.getLogger(__name__)

Job = Callable[[], Stored]


class StoreJobs:
    """on_done is called in the storing thread with what became of a job, or None if it failed. Jobs
    still queued when the interpreter ends are finished first."""

    def __init__(self, bound: int, on_done: Callable[[Stored | None], None]) -> None:
        self._bound = bound
        self._on_done = on_done
        self._lock = threading.Lock()
        self._pending: set[concurrent.futures.Future[None]] = set()
        self._failed = False  # a job that ended since the last flush
        self._closed = False
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvw-store")

    def put(self, job: Job) -> bool:
        """Queues `job`; False where the queue is full or closed. Never blocks."""
        with self._lock:
            if self._closed or len(self._pending) >= self._bound:
                return False
            future = self._pool.submit(self._run, job)
            self._pending.add(future)
        future.add_done_callback(self._forget)
        return True

    def flush(self, timeout_s: float) -> bool:
        """Waits until the jobs queued before the call are done, at most timeout_s; False where
        some are not, or where a job failed since the last flush."""
        with self._lock:
            pending = set(self._pending)
        waiting = concurrent.futures.wait(pending, timeout_s).not_done
        with self._lock:
            failed, self._failed = self._failed, False
        return not waiting and not failed

    def close(self) -> None:
        """Refuses new jobs and waits for those queued: each is bounded by its own timeout."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True)

    def _run(self, job: Job) -> None:
        try:
            done: Stored | None = job()
        except Exception as error:  # noqa: BLE001 - a thread's edge: a lost store is a miss later
            # Its text alone: whoever keeps the log's records would keep its frames, and the cache.
            _log.warning("store failed: %s: %s", type(error).__name__, str(error))
            done = None
            with self._lock:
                self._failed = True
        self._on_done(done)

    def _forget(self, future: concurrent.futures.Future[None]) -> None:
        with self._lock:
            self._pending.discard(future)
