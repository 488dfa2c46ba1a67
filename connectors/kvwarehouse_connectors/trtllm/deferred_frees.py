"""Finished requests whose blocks the engine keeps until they are copied, for want of room before.

Everything here runs in the engine's thread, which also takes the blocks back: a block is copied
only while it is held. A hold ends when all is copied, or with its time; what is left is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.trtllm.counts import Counts
from kvwarehouse_connectors.trtllm.messages import SaveOrder


class DeferredFrees:
    """copy: takes a copy of a run's blocks on their way to the warehouse; False where there is no
    room for it now. most_pages: of one copy, for each part."""

    def __init__(
        self,
        copy: Callable[[PageRun], bool],
        most_pages: Sequence[int],
        hold_s: float,
        counts: Counts,
    ) -> None:
        self._copy = copy
        self._most_pages = most_pages
        self._hold_s = hold_s
        self._counts = counts
        self._ends_s: dict[int, float] = {}
        self._left: dict[int, list[PageRun]] = {}

    def ordered(self, orders: Sequence[SaveOrder]) -> None:
        """What is to be copied of requests that are held. A request whose hold has ended is passed
        over: its blocks may be another's."""
        for order in orders:
            if order.request_id in self._ends_s:
                self._left[order.request_id] = list(order.runs)
            else:
                self._counts.add("dropped_blocks", sum(len(run.blocks) for run in order.runs))

    def finished(self, started: Sequence[int]) -> list[int]:
        """started: requests that the engine holds from now on. Copies what there is room for, and
        returns those that need not be held any more."""
        now = time.monotonic()
        for name in started:
            self._ends_s[name] = now + self._hold_s
        over = []
        for name, end_s in self._ends_s.items():
            left = self._left.get(name)
            if left:
                self._copy_some(left)
            if left == []:
                over.append(name)
            elif now >= end_s:
                over.append(name)
                self._counts.add("expired_holds")
                self._counts.add("dropped_blocks", sum(len(run.blocks) for run in left or ()))
        for name in over:
            del self._ends_s[name]
            self._left.pop(name, None)
        return over

    def _copy_some(self, left: list[PageRun]) -> None:
        while left:
            run = left[0]
            part = run.cut(0, min(len(run.blocks), self._most_pages[run.group]))
            if not self._copy(part):
                return
            left[0] = run.cut(len(part.blocks), len(run.blocks))
            if not left[0].blocks:
                left.pop(0)
