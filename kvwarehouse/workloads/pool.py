"""Conversations under way: who asks next. Not thread-safe.

Requests arrive as a Poisson process, as in the public traces; each one goes on with the
conversation that has waited longest for its turn, and begins a new one where none is due. So the
rate is steady from the first second, and what is in memory is the conversations that go on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvwarehouse.workloads.draws import Draws

_T = TypeVar("_T")


class Pool(Generic[_T]):
    def __init__(self, draws: Draws, requests_per_s: float) -> None:
        self._draws = draws
        self._mean_s = 1 / requests_per_s
        self._due: list[tuple[float, int, _T]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._due)

    def arrivals(self) -> Iterator[tuple[float, _T | None]]:
        """Without end: the time, and what is due then, None for something new."""
        time_s = 0.0
        while True:
            time_s += self._draws.wait(self._mean_s)
            due = self._due
            yield time_s, heapq.heappop(due)[2] if due and due[0][0] <= time_s else None

    def add(self, due_s: float, conversation: _T) -> None:
        self._added += 1
        heapq.heappush(self._due, (due_s, self._added, conversation))
