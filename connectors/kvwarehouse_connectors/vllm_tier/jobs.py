"""Jobs on chunks, made by threads of their own: each is reported once, within its time, and never
while a thread still reads or writes the chunks' memory.

A job that waits when its time is over is reported as failed, and no thread begins it any more. One
that runs is reported when its thread is done with it; the calls that a thread makes take a bounded
time (page_store.py), so that this is soon. There is no way to report a job that runs: vLLM gives
its rows to others as soon as it hears of it.

Thread-safe. Only `drain` and `close` block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import kvwarehouse as kvw
from kvwarehouse_connectors.vllm_tier.chunks import TierChunk

_log = logging.getLogger(__name__)

# What a call of a thread may take beyond its job's time, before the log says that it hangs.
_GRACE_S = 5.0


@dataclass(eq=False)
class Job:
    """One call of vLLM's. until_s: a moment of time.monotonic()."""

    number: int
    request_id: str
    chunks: list[TierChunk]
    until_s: float
    step: int = -1
    """Of the engine's: it counts if the weights were right until then."""
    epoch: int = 0
    """In which its keys were made."""
    begin_s: float = field(default_factory=time.monotonic)
    pins: list[kvw.Pins] = field(default_factory=list)
    """What keeps chunks in DRAM for it."""
    cancelled: bool = False
    """Whether nobody wants it any more: a thread that makes it begins no further call."""

    @property
    def left_s(self) -> float:
        return 0.0 if self.cancelled else max(0.0, self.until_s - time.monotonic())


@dataclass
class JobOutcome:
    """What became of a job. done: the chunks that were loaded, or are stored."""

    job: Job
    done: list[TierChunk]
    size_bytes: int = 0
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """A job without chunks is none that went well: it was refused before they were known."""
        return bool(self.done) and len(self.done) == len(self.job.chunks)


Make = Callable[[Job], JobOutcome]


class Jobs:
    """name: of the threads. most: jobs that wait; further ones fail at once. make: makes a job, in
    a thread; what it raises is a failed job."""

    def __init__(self, name: str, threads: int, most: int, make: Make) -> None:
        self._make = make
        self._most = most
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._ended: list[JobOutcome] = []
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvw-tier-{name}", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> bool:
        """False where it failed at once, which is reported as any other end."""
        with self._changed:
            if self._closed or len(self._waiting) >= self._most:
                self._ended.append(JobOutcome(job, []))
                return False
            self._waiting.append(job)
            self._changed.notify()
            return True

    def refuse(self, job: Job) -> None:
        """Reports it as failed, without making it."""
        with self._changed:
            self._ended.append(JobOutcome(job, []))

    def take(self) -> list[JobOutcome]:
        """Of the jobs that ended since the last call."""
        with self._changed:
            now = time.monotonic()
            late = [job for job in self._waiting if job.until_s <= now]
            if late:
                self._fail(late)
            ended, self._ended = self._ended, []
            return ended

    @property
    def pending(self) -> bool:
        """Whether a job waits, runs, or has ended and was not taken."""
        with self._changed:
            return bool(self._waiting or self._running or self._ended)

    def drain(self) -> None:
        """Returns when no job waits or runs: those that wait have failed. Blocks for those that
        run, which end by their own bounds."""
        with self._changed:
            self._cancel()
            while not self._changed.wait_for(lambda: not self._running, _GRACE_S):
                for job in self._running:
                    if time.monotonic() > job.until_s + _GRACE_S:
                        _log.error("kvwarehouse: a job of %s hangs; vLLM waits", job.request_id)

    def close(self) -> bool:
        """Ends the threads. False where one goes on although its job's time is long over: it may
        still touch the job's memory."""
        with self._changed:
            self._closed = True
            self._cancel()
            self._changed.notify_all()
            end = max((job.until_s for job in self._running), default=0.0)
        end = max(end, time.monotonic()) + _GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _cancel(self) -> None:
        for job in self._running:
            job.cancelled = True
        self._fail(list(self._waiting))

    def _fail(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._waiting.remove(job)
            self._ended.append(JobOutcome(job, []))

    def _next(self) -> Job | None:
        """Blocks until there is one; None when closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return None
                job = self._waiting.popleft()
                if job.until_s > time.monotonic():
                    self._running.add(job)
                    return job
                self._ended.append(JobOutcome(job, []))

    def _run(self) -> None:
        while (job := self._next()) is not None:
            outcome = JobOutcome(job, [])
            try:
                outcome = self._make(job)
            except Exception:  # noqa: BLE001 - a thread's edge: the job is reported as failed
                _log.exception("kvwarehouse: a job failed")
            outcome.seconds = time.monotonic() - job.begin_s
            with self._changed:
                self._running.remove(job)
                self._ended.append(outcome)
                self._changed.notify_all()
