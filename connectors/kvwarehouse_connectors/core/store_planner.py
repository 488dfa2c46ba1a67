"""What to store of each step: full blocks that are neither stored nor on their way.

Engines tell which blocks a step fills, each in its own way; what of them is worth a store, and what
there is room for, is decided here. Full attention may be caught up with in a later step; blocks of
a window may be gone by then, so they are stored in the step that fills them or not at all. Runs in
the scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.prefix_matcher import (
    BlockKeys,
    PrefixHit,
    PrefixMatcher,
    consecutive,
    page_run,
)


@dataclass(kw_only=True)
class TrackedRequest:
    """What a connector's scheduler remembers of a request. One per request; not thread-safe."""

    keys: BlockKeys
    loads: bool
    stores: bool
    considered: list[int]
    """Per group, the blocks from the first on that were stored or passed over."""
    hit: PrefixHit | None = None
    """Found and given to the engine, and not being loaded yet."""

    def drop_hit(self) -> None:
        """Releases the pins of a hit that is not loaded after all."""
        if self.hit is not None:
            self.hit.release()
            self.hit = None


_Tracked = TypeVar("_Tracked", bound=TrackedRequest)


class StorePlanner(Generic[_Tracked]):
    """spaces: one for each group, in their order. step_bytes: at most so much of one step is stored
    by one rank. absent_block: what a block table has in the place of a block that is not there."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        spaces: Sequence[kvw.Namespace],
        step_bytes: int,
        absent_block: int,
    ) -> None:
        self._groups = groups
        self._page_bytes = [space.page_bytes for space in spaces]
        self._step_bytes = step_bytes
        self._absent = absent_block
        # Both begin anew with each plan. Requests of a step may share blocks.
        self._planned: set[tuple[int, bytes]] = set()
        self._left_bytes = 0

    def _begin(self, most_bytes: int) -> list[PageRun]:
        """Begins a plan of at most so much for one rank; returns where its runs go."""
        self._planned.clear()
        self._left_bytes = most_bytes
        return []

    def _add(
        self,
        tracked: _Tracked,
        place: int,
        blocks: range,
        table: Sequence[int],
        matcher: PrefixMatcher,
        runs: list[PageRun],
    ) -> int:
        """Adds to `runs` what is to be stored of full blocks of a request in one group, and counts
        them as considered. Returns where it ended: before the end of `blocks` where the rest has to
        wait for a later step, for want of room."""
        end = blocks.stop
        if blocks.start >= end:
            return end
        group = self._groups[place]
        fresh = [block for block in blocks if table[block] != self._absent]
        wanted, names = [], []
        for block in matcher.missing(place, tracked.keys, fresh) if fresh else ():
            name = self._name(place, tracked, block)
            if name not in self._planned:
                wanted.append(block)
                names.append(name)
        room = max(0, self._left_bytes) // self._page_bytes[place]
        if can_catch_up(group) and len(wanted) > room:
            end = wanted[room]
        taken = wanted[:room]
        self._planned.update(names[:room])
        self._left_bytes -= len(taken) * self._page_bytes[place]
        tracked.considered[place] = end
        parts = consecutive(taken) if group.chained else [taken] if taken else []
        for part in parts:
            run = page_run(place, group, tracked.keys, part, table)
            runs.append(run)
            self._on_planned(tracked, group, part, run)
        return end

    def _on_planned(
        self, tracked: _Tracked, group: CacheGroup, blocks: Sequence[int], run: PageRun
    ) -> None:
        """For engines that announce what they store: `blocks` of a request became `run`."""

    def _name(self, place: int, tracked: _Tracked, block: int) -> tuple[int, bytes]:
        """What the same block of another request has too."""
        each = self._groups[place].block_hashes
        return place, tracked.keys.keys(block, block + 1, each)[0]


def can_catch_up(group: CacheGroup) -> bool:
    """Whether blocks that were left out are still in the table in a later step."""
    return group.chained and not group.reach_tokens
