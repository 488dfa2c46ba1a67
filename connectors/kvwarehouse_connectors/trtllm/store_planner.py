"""What to store of each step of TensorRT-LLM: blocks that it fills, in all parts, as they are
filled, and what was left out of full attention when a request ends.

Blocks of a window are taken back by the engine after the step that fills them. Runs in the
scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.prefix_matcher import PrefixMatcher
from kvwarehouse_connectors.core.store_planner import (
    FilledBlocks,
    StorePlanner,
    can_catch_up,
)
from kvwarehouse_connectors.trtllm.parts import ABSENT
from kvwarehouse_connectors.trtllm.settings import Settings
from kvwarehouse_connectors.trtllm.tracked import TrtllmRequest

_ALL_BYTES = 1 << 62


class TrtllmStorePlanner(StorePlanner[TrtllmRequest]):
    """A rank copies at most half of its staging memory in one step; the rest of full attention
    follows with the next ones."""

    def __init__(
        self, groups: Sequence[CacheGroup], spaces: Sequence[kvw.Namespace], settings: Settings
    ) -> None:
        super().__init__(groups, spaces, settings.staging_bytes // 2, ABSENT)
        self._generated = settings.store_generated

    def plan(self, scheduled: Iterable[TrtllmRequest], matcher: PrefixMatcher) -> list[PageRun]:
        """The blocks that are full when this step has run."""
        runs = self._begin(self._step_bytes)
        filled = [
            self._filled(tracked, place)
            for tracked in scheduled
            if tracked.stores
            for place in range(len(self._groups))
        ]
        self._add_all(filled, matcher, runs)
        return runs

    def rest(self, tracked: TrtllmRequest, matcher: PrefixMatcher) -> tuple[PageRun, ...]:
        """What is full and was left out so far, of full attention: for a request that ends."""
        runs = self._begin(_ALL_BYTES)
        filled = [
            self._filled(tracked, place)
            for place, group in enumerate(self._groups)
            if can_catch_up(group)
        ]
        self._add_all(filled, matcher, runs)
        return tuple(runs)

    def behind(self, tracked: TrtllmRequest) -> bool:
        """Whether full blocks of full attention were left out, for want of room."""
        return any(
            tracked.considered[place] < self._full(tracked, group)
            for place, group in enumerate(self._groups)
            if can_catch_up(group)
        )

    def _full(self, tracked: TrtllmRequest, group: CacheGroup) -> int:
        """Blocks whose tokens are all computed when the step has run."""
        computed = tracked.computed
        if not self._generated:
            computed = min(computed, tracked.prompt_tokens)
        table = tracked.tables[group.index] if tracked.tables else ()
        return min(computed // group.block_tokens, tracked.keys.count(1), len(table))

    def _filled(self, tracked: TrtllmRequest, place: int) -> FilledBlocks[TrtllmRequest]:
        """What one request has in one part."""
        group = self._groups[place]
        begin = tracked.considered[place]
        if group.reach_tokens:  # what was there before the step may not be there any more
            begin = max(begin, tracked.step_begin // group.block_tokens)
        full = self._full(tracked, group)
        table = tracked.tables[group.index] if tracked.tables else ()
        tokens = full * group.block_tokens
        return FilledBlocks(tracked, place, range(begin, full), tokens, table)
