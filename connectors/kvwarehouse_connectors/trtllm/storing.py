"""What to store of each step: blocks that it fills, in all parts, as they are filled.

Full attention may be caught up with in a later step, or when the request ends; blocks of a window
are stored in the step that fills them or not at all, because the engine takes them back. Runs in
the scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.prefix_matcher import PrefixMatcher, consecutive, page_run
from kvwarehouse_connectors.trtllm.parts import ABSENT
from kvwarehouse_connectors.trtllm.settings import Settings
from kvwarehouse_connectors.trtllm.tracked import Tracked


class StorePlanner:
    """A rank copies at most half of its staging memory in one step; the rest of full attention
    follows with the next ones."""

    def __init__(
        self, groups: Sequence[CacheGroup], spaces: Sequence[kvw.Namespace], settings: Settings
    ) -> None:
        self._groups = groups
        self._page_bytes = [space.page_bytes for space in spaces]
        self._generated = settings.store_generated
        self._step_bytes = settings.staging_bytes // 2
        self._planned: set[tuple[int, bytes]] = set()  # requests of a step may share blocks

    def plan(self, scheduled: Iterable[Tracked], matcher: PrefixMatcher) -> list[PageRun]:
        """The blocks that are full when this step has run."""
        runs: list[PageRun] = []
        left = self._step_bytes
        self._planned.clear()
        for tracked in scheduled:
            if tracked.stores:
                for place in range(len(self._groups)):
                    left = self._part(tracked, place, matcher, runs, left)
        return runs

    def rest(self, tracked: Tracked, matcher: PrefixMatcher) -> tuple[PageRun, ...]:
        """What is full and was left out so far, of full attention: for a request that ends."""
        runs: list[PageRun] = []
        self._planned.clear()
        for place, group in enumerate(self._groups):
            if not group.reach_tokens:
                self._part(tracked, place, matcher, runs, 1 << 62)
        return tuple(runs)

    def behind(self, tracked: Tracked) -> bool:
        """Whether full blocks of full attention were left out, for want of room."""
        return any(
            tracked.considered[place] < self._full(tracked, group)
            for place, group in enumerate(self._groups)
            if not group.reach_tokens
        )

    def _full(self, tracked: Tracked, group: CacheGroup) -> int:
        """Blocks whose tokens are all computed when the step has run."""
        computed = tracked.computed
        if not self._generated:
            computed = min(computed, tracked.prompt_tokens)
        table = tracked.tables[group.index] if tracked.tables else ()
        return min(computed // group.block_tokens, tracked.keys.count(1), len(table))

    def _part(
        self, tracked: Tracked, place: int, matcher: PrefixMatcher, runs: list[PageRun], left: int
    ) -> int:
        """Adds what one request has in one part; returns the bytes that are left for others."""
        group = self._groups[place]
        end = self._full(tracked, group)
        begin = tracked.considered[place]
        if group.reach_tokens:  # what was there before the step may not be there any more
            begin = max(begin, tracked.step_begin // group.block_tokens)
        if begin >= end:
            return left
        table = tracked.tables[group.index]
        fresh = [b for b in range(begin, end) if table[b] != ABSENT]
        wanted = matcher.missing(place, tracked.keys, fresh) if fresh else []
        wanted = [b for b in wanted if self._name(place, tracked, b) not in self._planned]
        room = max(0, left) // self._page_bytes[place]
        if not group.reach_tokens and len(wanted) > room:
            end = wanted[room]
        taken = wanted[:room]
        self._planned.update(self._name(place, tracked, b) for b in taken)
        tracked.considered[place] = end
        for part in consecutive(taken):
            runs.append(page_run(place, group, tracked.keys, part, table))
        return left - len(taken) * self._page_bytes[place]

    def _name(self, place: int, tracked: Tracked, block: int) -> tuple[int, bytes]:
        return place, tracked.keys.keys(block, block + 1, 1)[0]
