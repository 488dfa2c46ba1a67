"""Which states of the store are told as events: those that last, and each once. One that changes
every second is in the reports, and would be nothing but lines in a log. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvwarehouse.remote.report import WorkerEvent, WorkerReport

LASTS_S: Final = 5.0


class StateEvents:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = self._told = "starting"
        self._since_s = clock()

    def of(self, report: WorkerReport) -> WorkerEvent | None:
        """What is to be told now. `starting` is nothing that happens."""
        now_s = self._clock()
        if report.state != self._state:
            self._state, self._since_s = report.state, now_s
        if self._state in ("starting", self._told) or now_s - self._since_s < LASTS_S:
            return None
        self._told = self._state
        fields = {"text": report.reason} if report.reason else {}
        return WorkerEvent(f"remote_{report.state}", fields)
