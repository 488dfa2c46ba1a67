"""A drive: workers that take requests at their pace and ask an engine, until the trace, the bounds
or the user end it. One use; `run` blocks.

Requests come from a trace in memory, or from a workload as it is made. The pace says which goes out
next and when: by the trace's clock, or as soon as one is done. It is thread-safe: workers take
requests one after the other.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from kvwarehouse.errors import InternalError, WarehouseError
from kvwarehouse.loadgen.histogram import Histogram
from kvwarehouse.trace.trace import Trace
from kvwarehouse.workloads.call import WorkloadCall

_PATIENCE_S = 30.0


def calls_of(trace: Trace, *, again: bool = False) -> Iterator[WorkloadCall]:
    """Its requests; with `again` without end, each time through with block ids of its own, so that
    nothing is hit that an earlier time has left."""
    for passed in count() if again else (0,):
        # A moment apart, as if the last request were followed by one more of the same gap.
        shift_s = passed * (trace.span_s + trace.span_s / max(1, trace.requests - 1))
        begin = 0
        for at in range(trace.requests):
            end = int(trace.ends[at])
            blocks = trace.pages[begin:end].astype(object) + passed * trace.ids
            yield WorkloadCall(
                float(trace.times_s[at]) + shift_s,
                int(trace.input_tokens[at]),
                int(trace.output_tokens[at]),
                blocks.tolist(),
                at,
            )
            begin = end


@dataclass(frozen=True)
class DriveBounds:
    """`speed` None: closed loop, a request as soon as a worker is free. Else open: the trace's
    times divided by it, whether the engine keeps up or not. At most `workers` are under way."""

    workers: int
    speed: float | None
    requests: int | None
    duration_s: float | None
    deadline_s: float


class DrivePace:
    def __init__(
        self, requests: Iterator[WorkloadCall], bounds: DriveBounds, clock: Callable[[], float]
    ) -> None:
        self._requests = requests
        self._bounds = bounds
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._first_s: float | None = None
        self._taken = 0
        self.begin_s = clock()

    def take(self) -> tuple[WorkloadCall, float | None] | None:
        """The next request, after waiting for its time, and how late it is then (None in a closed
        loop); None when there are no more."""
        with self._lock:
            request = self._next()
        if request is None:
            return None
        if self._bounds.speed is None:
            return (request, None) if self._in_time(self._clock()) else None
        due_s = self.begin_s + (request.time_s - (self._first_s or 0.0)) / self._bounds.speed
        if not self._in_time(due_s) or not self._in_time(self._clock()):
            return None
        if self._stopped.wait(max(0.0, due_s - self._clock())):
            return None
        return request, max(0.0, self._clock() - due_s)

    def stop(self) -> None:
        """No request goes out from now on."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def _next(self) -> WorkloadCall | None:
        if self._stopped.is_set() or self._taken == self._bounds.requests:
            return None
        request = next(self._requests, None)
        if request is not None:
            self._taken += 1
            if self._first_s is None:
                self._first_s = request.time_s
        return request

    def _in_time(self, at_s: float) -> bool:
        duration_s = self._bounds.duration_s
        return duration_s is None or at_s < self.begin_s + duration_s


class DrivenEngine(Protocol):
    """Thread-safe: every worker asks it. What it finds it keeps itself."""

    def ask(self, request: WorkloadCall, deadline_s: float) -> None:
        """Returns when the request is answered or has failed, `deadline_s` from now at the latest.
        A failure is a finding; what it raises ends the drive."""

    def hang_up(self) -> None:
        """Ends the requests under way; they count as interrupted."""


class Drive:
    """`started`, `under_way` and `late` may be read while it runs; `late` is how long after their
    time the requests of an open loop went out."""

    def __init__(
        self,
        engine: DrivenEngine,
        requests: Iterator[WorkloadCall],
        bounds: DriveBounds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._bounds = bounds
        self._clock = clock
        self._pace = DrivePace(requests, bounds, clock)
        self._lock = threading.Lock()
        self._broken: Exception | None = None
        self._busy = 1
        self._over = threading.Event()
        self.started = 0
        self.under_way = 0
        self.late = Histogram()
        self.interrupted = False
        self.elapsed_s = 0.0

    @property
    def running_s(self) -> float:
        """Since the drive began."""
        return self._clock() - self._pace.begin_s

    def run(self, watch: Callable[[], None] = lambda: None, watch_s: float = 0.2) -> None:
        """`watch` is called now and then. An interrupt (SIGINT) ends the requests under way and is
        then no error: `interrupted` says so. A second one is raised. Signals are heard only where
        it runs in the main thread."""
        with self._hearing_interrupts():
            self._start()
            while not self._over.wait(watch_s):
                watch()
                if self.interrupted:
                    self._pace.stop()
                    self._engine.hang_up()
                    self._over.wait(_PATIENCE_S)
                    break
        self.elapsed_s = self.running_s
        if isinstance(self._broken, WarehouseError):
            raise self._broken
        if self._broken is not None:
            raise InternalError(
                f"a request could not be made: {type(self._broken).__name__}: {self._broken};"
                " please report it",
                code="drive_broken",
            ) from self._broken

    @contextmanager
    def _hearing_interrupts(self) -> Iterator[None]:
        """A note instead of an exception, which would come between any two steps of a start."""

        def heard(*_: object) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, heard)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _start(self) -> None:
        for at in range(self._bounds.workers):
            self._count(1)
            threading.Thread(target=self._work, name=f"kvw-drive-{at}", daemon=True).start()
        self._count(-1)

    def _count(self, more: int) -> None:
        """Of those that are not done: the workers, and the caller until it has started them."""
        with self._lock:
            self._busy += more
            if not self._busy:
                self._over.set()

    def _work(self) -> None:
        try:
            while (taken := self._pace.take()) is not None:
                request, late_s = taken
                with self._lock:
                    self.started += 1
                    self.under_way += 1
                    if late_s is not None:
                        self.late.add(late_s)
                try:
                    self._engine.ask(request, self._bounds.deadline_s)
                finally:
                    with self._lock:
                        self.under_way -= 1
        except Exception as error:  # noqa: BLE001  the edge of a thread: run() raises it
            self._broken = self._broken or error
            self._pace.stop()
        finally:
            self._count(-1)
