"""What to store of each step: full blocks that are neither stored nor on their way.

Engines tell which blocks a step fills, each in its own way; what of them is worth a store, and what
there is room for, is decided here. Full attention may be caught up with in a later step; blocks of
a window may be gone by then, so they are stored in the step that fills them or not at all. Of
these, what a prefix that ends with the step is found by goes first: without it, no part of full
attention is of use. Runs in the scheduler's thread alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    waiting: dict[int, int] = field(default_factory=dict)
    """By group of full attention, the blocks that are left out so far for want of room."""
    hit: PrefixHit | None = None
    """Found and given to the engine, and not being loaded yet."""

    def drop_hit(self) -> None:
        """Releases the pins of a hit that is not loaded after all."""
        if self.hit is not None:
            self.hit.release()
            self.hit = None


_Tracked = TypeVar("_Tracked", bound=TrackedRequest)


@dataclass(frozen=True)
class FilledBlocks(Generic[_Tracked]):
    """Blocks of a request that are full when a step has run, in one group. tokens: how many the
    request then has that are known."""

    tracked: _Tracked
    place: int
    blocks: range
    tokens: int
    table: Sequence[int]


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
        self._align = math.lcm(*(group.block_tokens for group in groups))
        # Both begin anew with each plan. Requests of a step may share blocks.
        self._planned: set[tuple[int, bytes]] = set()
        self._left_bytes = 0
        self._dropped = 0

    def take_dropped(self) -> int:
        """Blocks that there was no room for, and that cannot be caught up with, since this was last
        asked."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def ended(self, tracked: _Tracked) -> None:
        """What a request still has to catch up with is dropped: its blocks are the engine's."""
        self._dropped += sum(tracked.waiting.values())
        tracked.waiting.clear()

    def _begin(self, most_bytes: int) -> list[PageRun]:
        """Begins a plan of at most so much for one rank; returns where its runs go."""
        self._planned.clear()
        self._left_bytes = most_bytes
        return []

    def _add_all(
        self,
        filled: Sequence[FilledBlocks[_Tracked]],
        matcher: PrefixMatcher,
        runs: list[PageRun],
    ) -> None:
        """Adds to `runs` what is to be stored of a step's blocks, and counts them as considered."""
        parts = [self._parted(one) for one in filled]
        for last, _ in parts:
            if not can_catch_up(self._groups[last.place]):
                self._add(last, matcher, runs)
        for last, _ in parts:
            if can_catch_up(self._groups[last.place]):
                self._add(last, matcher, runs)
        for _, others in parts:
            self._add(others, matcher, runs)

    def _parted(
        self, one: FilledBlocks[_Tracked]
    ) -> tuple[FilledBlocks[_Tracked], FilledBlocks[_Tracked]]:
        """The blocks that computing on after the request's last tokens reads, and those before. Who
        sends the same prompt again has its last token computed, so that its prefix ends before."""
        end = max(0, one.tokens - 1) // self._align * self._align
        first = self._groups[one.place].first_needed(end)
        first = min(max(first, one.blocks.start), one.blocks.stop)
        return (
            replace(one, blocks=range(first, one.blocks.stop)),
            replace(one, blocks=range(one.blocks.start, first)),
        )

    def _add(
        self, one: FilledBlocks[_Tracked], matcher: PrefixMatcher, runs: list[PageRun]
    ) -> None:
        """As much as there is room for: of a chain the first blocks, of others the last. What is
        left out of full attention waits for a later step, the rest is dropped."""
        if not one.blocks:
            return
        tracked, place, end = one.tracked, one.place, one.blocks.stop
        group = self._groups[place]
        wanted = self._wanted(one, matcher)
        room = min(self._room(place), len(wanted))
        left_out = len(wanted) - room
        taken = wanted[:room] if group.chained else wanted[left_out:]
        if can_catch_up(group):
            tracked.waiting[place] = left_out
            end = wanted[room] if left_out else end
        else:
            self._dropped += left_out
        self._planned.update(self._name(place, tracked, block) for block in taken)
        self._left_bytes -= len(taken) * self._page_bytes[place]
        tracked.considered[place] = max(tracked.considered[place], end)
        for part in consecutive(taken) if group.chained else [taken] if taken else []:
            run = page_run(place, group, tracked.keys, part, one.table)
            runs.append(run)
            self._on_planned(tracked, group, part, run)

    def _wanted(self, one: FilledBlocks[_Tracked], matcher: PrefixMatcher) -> list[int]:
        """Those that are in the table, and neither stored nor in this plan."""
        there = [block for block in one.blocks if one.table[block] != self._absent]
        missing = matcher.missing(one.place, one.tracked.keys, there) if there else []
        return [
            block
            for block in missing
            if self._name(one.place, one.tracked, block) not in self._planned
        ]

    def _room(self, place: int) -> int:
        """Blocks of a group."""
        return max(0, self._left_bytes) // self._page_bytes[place]

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
