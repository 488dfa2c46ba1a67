"""What to store of each step of vLLM: blocks that it fills, in all groups, as they are filled.

Blocks of a window are gone from the table in the next step. States are handed over by vLLM at their
boundaries, once. Runs in the scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.prefix_matcher import PrefixMatcher
from kvwarehouse_connectors.core.store_planner import FilledBlocks, StorePlanner
from kvwarehouse_connectors.vllm.events import StoreEvents
from kvwarehouse_connectors.vllm.settings import Settings
from kvwarehouse_connectors.vllm.tracked import VllmRequest
from kvwarehouse_connectors.vllm.wishes import HANDOFF, asked

_NULL_BLOCK = 0  # of vLLM's block tables


class VllmStorePlanner(StorePlanner[VllmRequest]):
    """step_bytes: at most so much of one step is stored by one rank; the rest of full attention
    follows with the next steps of its request, the rest of other groups is dropped."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        spaces: Sequence[kvw.Namespace],
        settings: Settings,
        step_bytes: int,
        events: StoreEvents,
    ) -> None:
        super().__init__(groups, spaces, step_bytes, _NULL_BLOCK)
        self._settings = settings
        self._events = events
        self._least_tokens = min(group.block_tokens for group in groups)
        self._states = [p for p, group in enumerate(groups) if group.rule is Rule.STATE]

    def plan(
        self, step: Any, requests: Mapping[str, VllmRequest], matcher: PrefixMatcher, epoch: int
    ) -> list[PageRun]:
        """The blocks that are full when this step has run. Cheap for requests that fill none."""
        runs = self._begin(self._step_bytes)
        if self._states:
            self._boundaries(step, requests, matcher, epoch, runs)
        filled: list[FilledBlocks[VllmRequest]] = []
        computed_by: list[tuple[VllmRequest, int]] = []
        for request_id, scheduled in step.num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is None or not tracked.stores or tracked.epoch != epoch:
                continue
            computed = tracked.request.num_computed_tokens + scheduled
            if computed < tracked.next_tokens:
                continue
            tables = step.kv_connector_block_state.get_block_ids(request_id)
            if tables is not None:
                computed = self._storable(tracked, computed)
                computed_by.append((tracked, computed))
                filled += self._filled(tracked, computed, tables)
        self._add_all(filled, matcher, runs)
        for tracked, computed in computed_by:
            behind = self._behind(tracked, computed)
            tracked.next_tokens = 0 if behind else _next(computed, self._least_tokens)
        return runs

    def handoff_wanted(self, tracked: VllmRequest) -> bool:
        """A producer always says what it stored; others where the request asks."""
        wanted = asked(tracked.request.kv_transfer_params, HANDOFF)
        return tracked.stores and (wanted or not self._settings.loads)

    def stored_tokens(self, tracked: VllmRequest) -> int:
        """Tokens from the first on that were given to be stored, at whole blocks of all groups; 0
        of a model of states alone, which are stored at ends of chunks, not at every block."""
        groups = zip(self._groups, tracked.considered, strict=True)
        stored = (done * one.block_tokens for one, done in groups if one.rule is not Rule.STATE)
        return min(stored, default=0)

    def _storable(self, tracked: VllmRequest, computed: int) -> int:
        """Tokens of `computed` whose blocks may be stored."""
        if self._settings.store_generated:
            return computed
        return min(computed, int(tracked.request.num_prompt_tokens))

    def _filled(
        self, tracked: VllmRequest, computed: int, tables: Sequence[Sequence[int]]
    ) -> list[FilledBlocks[VllmRequest]]:
        """What one request has. Of the last block a token may not be known yet."""
        found = []
        for place, group in enumerate(self._groups):
            if group.rule is Rule.STATE:
                continue
            table = tables[group.index]
            known = tracked.keys.count(group.block_hashes)
            end = min(computed // group.block_tokens, known, len(table))
            blocks = range(tracked.considered[place], end)
            tokens = min(computed, known * group.block_tokens)
            found.append(FilledBlocks(tracked, place, blocks, tokens, table))
        return found

    def _behind(self, tracked: VllmRequest, computed: int) -> bool:
        """Whether full blocks are left for the next step: the last token of one was not known, or
        there was no room."""
        groups = zip(self._groups, tracked.considered, strict=True)
        return any(
            done < computed // group.block_tokens
            for group, done in groups
            if group.rule is not Rule.STATE
        )

    def _on_planned(
        self, tracked: VllmRequest, group: CacheGroup, blocks: Sequence[int], run: PageRun
    ) -> None:
        self._events.ordered(tracked.request, group, blocks, run.keys)

    def _boundaries(
        self,
        step: Any,
        requests: Mapping[str, VllmRequest],
        matcher: PrefixMatcher,
        epoch: int,
        runs: list[PageRun],
    ) -> None:
        """States that vLLM offers: (group, block, tokens up to there) of requests."""
        places = {self._groups[place].index: place for place in self._states}
        offers = step.kv_connector_block_state.boundary_state_offloads
        for request_id, entries in offers.items():
            tracked = requests.get(request_id)
            if tracked is None or not tracked.stores or tracked.epoch != epoch:
                continue
            for index, block_id, tokens in entries:
                place = places.get(index)
                if place is None or not block_id:
                    continue
                group = self._groups[place]
                block, rest = divmod(tokens, group.block_tokens)
                if rest or block > tracked.keys.count(group.block_hashes):
                    continue  # inside a block: it has no key of its own
                name = self._name(place, tracked, block - 1)
                if name in self._planned or not matcher.missing(place, tracked.keys, [block - 1]):
                    continue
                if not self._room(place):
                    self._dropped += 1
                    continue
                self._planned.add(name)
                self._left_bytes -= self._page_bytes[place]
                key = tracked.keys.keys(block - 1, block, group.block_hashes)[0]
                runs.append(PageRun(place, [key], [block_id], False))


def _next(tokens: int, step: int) -> int:
    """The first multiple of `step` beyond `tokens`."""
    return tokens // step * step + step
