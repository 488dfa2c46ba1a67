"""What `kvwarehouse top` remembers from one look at a warehouse to the next: how flows went,
and what failed lately. Bounded; one owner, not thread-safe.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from kvwarehouse.cli.top_frame import FlowLine, Frame, LossLine

KEPT: Final = 60
"""Intervals whose rates are kept for the little curves."""

_LOSS_SHOWN_S: Final = 10.0


@dataclass(frozen=True)
class Unreachable:
    """No daemon answers: why, by the error that every command would print, and since when."""

    code: str
    reason: str
    since: datetime


class History:
    def __init__(self) -> None:
        self.frame: Frame | None = None
        """The last one."""
        self.seen_at: datetime | None = None
        """Of the last frame."""
        self.restarted_at: datetime | None = None
        self.unreachable: Unreachable | None = None
        """While nobody answers."""
        self._curves: dict[str, deque[float | None]] = {}
        self._losses: dict[tuple[str, str], tuple[LossLine, datetime]] = {}

    def add(self, frame: Frame, now: datetime) -> None:
        self.unreachable = None
        if frame.restarted:
            self.restarted_at = now
            self._losses.clear()
        for flow in frame.flows:
            self._curve(flow.name).append(_height(flow))
        self._keep_losses(frame, now)
        self.frame, self.seen_at = frame, now

    def miss(self, code: str, reason: str, now: datetime) -> None:
        """Nobody answered at `now`."""
        since = self.unreachable.since if self.unreachable else now
        self.unreachable = Unreachable(code, reason, since)
        for curve in self._curves.values():
            curve.append(None)

    def curve(self, name: str) -> tuple[float | None, ...]:
        """Rates of the flow of that name, oldest first: bytes a second, else pages. None: not
        known then."""
        return tuple(self._curves.get(name, ()))

    @property
    def losses(self) -> tuple[LossLine, ...]:
        """Those that rose within the last 10 s; rate 0 if not in the last interval."""
        return tuple(line for line, _ in self._losses.values())

    def _keep_losses(self, frame: Frame, now: datetime) -> None:
        kept = {
            key: (replace(line, per_s=0.0), rose_at)
            for key, (line, rose_at) in self._losses.items()
            if (now - rose_at).total_seconds() < _LOSS_SHOWN_S
        }
        for line in frame.losses:
            kept[line.what, line.reason] = (line, now)
        self._losses = kept

    def _curve(self, name: str) -> deque[float | None]:
        return self._curves.setdefault(name, deque(maxlen=KEPT))


def _height(flow: FlowLine) -> float | None:
    return flow.pages_per_s if flow.bytes_per_s is None else flow.bytes_per_s
