"""A load that keeps to a schedule, and never waits for what comes too late.

Stateless; the call blocks and belongs in a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import kvwarehouse as kvw
from kvwarehouse_connectors.core.load_policy import Schedule


@dataclass
class LoadResult:
    """pages: how many came, in order, each verified. missed: reasons of others."""

    pages: int = 0
    seconds: float = 0.0
    missed: dict[str, int] = field(default_factory=dict)

    def then(self, rest: LoadResult, pages: int) -> LoadResult:
        """Of `pages` pages, this one, and `rest` of those after them, which were loaded beside it:
        what of both came in order."""
        seconds = max(self.seconds, rest.seconds)
        if self.pages < pages:
            return LoadResult(self.pages, seconds, self.missed)
        return LoadResult(pages + rest.pages, seconds, rest.missed)


def load_in_time(
    load: Callable[[int, float], kvw.Loaded],
    pages: int,
    schedule: Schedule,
    most_s: float,
    *,
    begin_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> LoadResult:
    """Loads `pages` pages by calls of load(first, timeout_s), which fills pages from `first` on and
    returns how many, in order.

    Ends when all are there, when one cannot come, when the next is late by the schedule, or after
    most_s seconds; both count from begin_s by `clock` (None: from now). What is at hand is taken
    even by a load that comes late itself. A clear beside a call ends it too: what would come next
    can be of other weights."""
    began = clock()
    begin = began if begin_s is None else begin_s
    result = LoadResult()
    while result.pages < pages:
        elapsed = clock() - begin
        due_s = min(schedule.due_s(result.pages), most_s)
        if result.pages and elapsed >= due_s:
            result.missed = {"late": pages - result.pages}
            break
        loaded = load(result.pages, max(due_s - elapsed, 0.0))
        result.pages += int(loaded)
        ends = "timeout" not in loaded.missed or "cleared" in loaded.missed
        if result.pages < pages and ends:
            result.missed = dict(loaded.missed)
            break
        if not loaded and clock() - begin >= due_s:
            result.missed = {"late": pages - result.pages}
            break
    result.seconds = clock() - began
    return result
