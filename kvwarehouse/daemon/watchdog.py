"""Ends calls whose client stands still or trickles, and streams that outlive their time, so that no
client can hold a thread. What the daemon itself does for a call has bounds of its own.

A synchronous gRPC call that waits for its client waits without a bound; only cancelling the call
wakes it. Thread-safe. The watching thread ends soon after the last call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import grpc

from kvwarehouse.daemon.deadline import LONGEST_S, Deadline
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.repeats import SeldomTold

FIRST_S: Final = 10.0
"""How long a call may wait for its first message to be whole. None is larger than 8 MiB."""

STALL_S: Final = 30.0
"""How long a stream may wait for its client: for what it sends, all messages together, and for it
to take each of ours."""

PACE_BYTES_S: Final = 64 << 10
"""A client that sends gets a second of that back for each so many bytes: so slow it may be."""

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
        self._patience_s = FIRST_S
        self._heard = False
        self.method = method

    @contextmanager
    def client_turn(self) -> Iterator[None]:
        """Around each wait for the client."""
        self._waits_since = since = self._clock()
        try:
            yield
        finally:
            self._waits_since = None
            self._patience_s -= self._clock() - since

    def heard(self, size_bytes: int) -> None:
        """The client has sent a message."""
        earned_s = size_bytes / PACE_BYTES_S if self._heard else STALL_S
        self._heard = True
        self._patience_s = min(STALL_S, self._patience_s + earned_s)

    def told(self) -> None:
        """The client has taken a message, whose size is our choice."""
        self._patience_s = STALL_S

    def said_last(self) -> None:
        """From here on all waits are for the client, which has this long."""
        self._patience_s = STALL_S
        self._waits_since = self._clock()

    def overdue(self) -> str:
        """Why the stream must end now, or ""."""
        if self._deadline.overdue_s() > _MARGIN_S:
            return "deadline"
        since = self._waits_since
        waited_s = 0.0 if since is None else self._clock() - since
        return "stalled" if waited_s > self._patience_s else ""

    def end(self) -> None:
        self._context.cancel()


class Watchdog:
    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: how long a stream has waited is measured by it, in seconds."""
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._watched: set[Watched] = set()
        self._ended: SeldomTold[tuple[str, str]] = SeldomTold()  # by method and why
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(
        self, context: grpc.ServicerContext, deadline: Deadline, method: str
    ) -> Iterator[Watched]:
        """Watches the call of `context` for as long as the context lasts."""
        stream = Watched(context, deadline, method, self._clock)
        self._add(stream)
        try:
            yield stream
        finally:
            self.forget(stream)

    def leaving(self, context: grpc.ServicerContext, method: str) -> Watched:
        """Watches, until forget(), that the client takes what the call has said last."""
        stream = Watched(context, Deadline(LONGEST_S), method, self._clock)
        stream.said_last()
        self._add(stream)
        return stream

    def forget(self, stream: Watched) -> None:
        with self._lock:
            self._watched.discard(stream)

    def _add(self, stream: Watched) -> None:
        with self._lock:
            self._watched.add(stream)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
                with suppress(RuntimeError):  # no thread is to be had now: the next call asks again
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                if not self._watched:
                    self._thread = None
                    return
            self.look()

    def look(self) -> None:
        """Ends what is overdue now."""
        with self._lock:
            overdue = [(stream, why) for stream in self._watched if (why := stream.overdue())]
            for stream, why in overdue:
                self._ended.count((stream.method, why))
        self.tell()
        for stream, _ in overdue:
            stream.end()
            self.forget(stream)

    def tell(self) -> None:
        """Says in the log what was ended since, by method and reason, and of each as seldom as of
        refused calls: many clients that stand still do not fill it."""
        with self._lock:
            due = self._ended.due(self._clock())
        for (method, why), count in due:
            self._log.event(Event.STREAM_STALLED, method=method, why=why, count=count)
