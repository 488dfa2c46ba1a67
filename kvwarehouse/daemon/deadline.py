"""Deadlines of calls: every wait of the server is bounded by the caller's and by our own."""

from __future__ import annotations

import time
from typing import Final

import grpc

DEFAULT_S: Final = 30.0
"""For a call that has none: longer than any healthy call, short enough to free its thread."""

LONGEST_S: Final = 600.0
"""For a call that asks for more: a flush of a full write queue to a slow disk ends within this."""

LONGEST_STREAM_S: Final = 3600.0
"""For a stream, which its client moves all the time or is ended by the watchdog."""

LONGEST_CHECK_S: Final = 86_400.0
"""For a check, which reads a whole tier: some hours at the speed of a disk, where it is large."""

LONGEST_WATCH_S: Final = 86_400.0
"""For a stream that has no end of its own: whoever watches begins again once a day."""


class Deadline:
    """A point in time (monotonic clock). Immutable."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @classmethod
    def of(
        cls,
        context: grpc.ServicerContext,
        longest_s: float = LONGEST_S,
        default_s: float = DEFAULT_S,
    ) -> Deadline:
        remaining = context.time_remaining()
        # Without a deadline gRPC says None, or so many years that they are none.
        seconds = default_s if remaining is None or remaining > 1e8 else remaining
        return cls(min(seconds, longest_s))

    def remaining_s(self) -> float:
        return max(0.0, self._at - time.monotonic())

    def within_s(self, wanted_s: float) -> float:
        """`wanted_s`, at most what remains; what remains, if `wanted_s` is 0 or less."""
        remaining = self.remaining_s()
        return min(wanted_s, remaining) if wanted_s > 0 else remaining

    def overdue_s(self) -> float:
        """How long ago it was; negative before."""
        return time.monotonic() - self._at

    @property
    def passed(self) -> bool:
        return self.remaining_s() <= 0
