"""Ends streams whose client stands still or that outlive their time, so that no client can hold a
thread. What the daemon itself does for a stream has bounds of its own.

A synchronous gRPC call that waits for its client waits without a bound; only cancelling the call
wakes it. Thread-safe. The watching thread runs only while something is watched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from kvwarehouse.daemon.deadline import Deadline
from kvwarehouse.daemon.logs import Event, Log

STALL_S: Final = 30.0
"""How long a stream may wait for its client: to send a message, or to take one."""

_LOOK_S: Final = 0.5

_MARGIN_S: Final = 1.0
"""A client's own deadline ends its call, and says so; this is for those that have none."""


class Watched:
    """One stream."""

    def __init__(
        self,
        context: grpc.ServicerContext,
        deadline: Deadline,
        method: str,
        clock: Callable[[], float],
    ) -> None:
        self._context = context
        self._deadline = deadline
        self._clock = clock
        self._waits_since: float | None = None
        self.method = method

    @contextmanager
    def client_turn(self) -> Iterator[None]:
        """Around each wait for the client."""
        self._waits_since = self._clock()
        try:
            yield
        finally:
            self._waits_since = None

    def overdue(self, stall_s: float) -> str:
        """Why the stream must end now, or ""."""
        if self._deadline.overdue_s() > _MARGIN_S:
            return "deadline"
        since = self._waits_since
        return "stalled" if since is not None and self._clock() - since > stall_s else ""

    def end(self) -> None:
        self._context.cancel()


class Watchdog:
    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: how long a stream has waited is measured by it, in seconds."""
        self._log = log
        self._clock = clock
        self._changed = threading.Condition()
        self._watched: set[Watched] = set()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(
        self, context: grpc.ServicerContext, deadline: Deadline, method: str
    ) -> Iterator[Watched]:
        """Watches the call of `context` for as long as the context lasts."""
        stream = Watched(context, deadline, method, self._clock)
        with self._changed:
            self._watched.add(stream)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
                self._thread.start()
        try:
            yield stream
        finally:
            with self._changed:
                self._watched.discard(stream)
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._watched:
                    self._thread = None
                    return
                self._changed.wait(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Ends what is overdue now."""
        with self._changed:
            streams = list(self._watched)
        for stream in streams:
            why = stream.overdue(STALL_S)
            if why:
                self._log.event(Event.STREAM_STALLED, method=stream.method, why=why)
                stream.end()
                with self._changed:
                    self._watched.discard(stream)
