"""Calls over gRPC that were refused for who asked or for how many did: counted each, and told in
the log at a rate that those who ask cannot raise.

Thread-safe: counted by the threads of calls, looked at by one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.metrics import REFUSAL_REASONS

TOLD_EVERY_S: Final = 10.0
"""Between two lines of one reason, at least."""


class Refusals:
    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds."""
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(REFUSAL_REASONS, 0)
        self._peers = dict.fromkeys(REFUSAL_REASONS, "")
        self._told: dict[str, tuple[float, int]] = {}  # when last, and of how many

    @property
    def counts(self) -> dict[str, int]:
        """Since the start, by reason."""
        with self._lock:
            return dict(self._counts)

    def count(self, reason: str, peer: str) -> None:
        """`peer`: as gRPC calls who asked. A reason outside the closed set is "other"."""
        reason = reason if reason in self._counts else "other"
        with self._lock:
            self._counts[reason] += 1
            self._peers[reason] = peer

    def look(self) -> None:
        """Tells what came since it was told last."""
        now = self._clock()
        for reason, count in self.counts.items():
            told_at, told = self._told.get(reason, (now - TOLD_EVERY_S, 0))
            if count > told and now - told_at >= TOLD_EVERY_S:
                self._told[reason] = (now, count)
                self._log.event(
                    Event.CALLS_REFUSED,
                    reason=reason,
                    count=count - told,
                    last_from=self._peers[reason],
                )
