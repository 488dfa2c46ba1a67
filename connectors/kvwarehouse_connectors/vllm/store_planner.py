"""What to store of each step of vLLM: blocks that it fills, in all groups, as they are filled.

Blocks of a window are gone from the table in the next step. States are handed over by vLLM at their
boundaries. Runs in the scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.prefix_matcher import PrefixMatcher
from kvwarehouse_connectors.core.store_planner import StorePlanner
from kvwarehouse_connectors.vllm.events import StoreEvents
from kvwarehouse_connectors.vllm.settings import Settings
from kvwarehouse_connectors.vllm.tracked import VllmRequest
from kvwarehouse_connectors.vllm.wishes import HANDOFF, asked

_NULL_BLOCK = 0  # of vLLM's block tables


class VllmStorePlanner(StorePlanner[VllmRequest]):
    """step_bytes: at most so much of one step is stored by one rank; the rest of full attention
    follows with the next steps."""

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
        for request_id, scheduled in step.num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is None or not tracked.stores or tracked.epoch != epoch:
                continue
            computed = tracked.request.num_computed_tokens + scheduled
            if computed < tracked.next_tokens:
                continue
            tables = step.kv_connector_block_state.get_block_ids(request_id)
            if tables is not None:
                self._add_request(tracked, computed, tables, matcher, runs)
        if self._states:
            self._boundaries(step, requests, matcher, epoch, runs)
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

    def _add_request(
        self,
        tracked: VllmRequest,
        computed: int,
        tables: Sequence[Sequence[int]],
        matcher: PrefixMatcher,
        runs: list[PageRun],
    ) -> None:
        """Adds what one request has."""
        if not self._settings.store_generated:
            computed = min(computed, tracked.request.num_prompt_tokens)
        behind = False
        for place, group in enumerate(self._groups):
            if group.rule is Rule.STATE:
                continue
            table = tables[group.index]
            full = computed // group.block_tokens
            end = min(full, tracked.keys.count(group.block_hashes), len(table))
            fresh = range(tracked.considered[place], end)
            done = self._add(tracked, place, fresh, table, matcher, runs)
            # Its last token is not known yet, or there is no room.
            behind = behind or end < full or done < end
        tracked.next_tokens = 0 if behind else _next(computed, self._least_tokens)

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
                if name not in self._planned and matcher.missing(place, tracked.keys, [block - 1]):
                    self._planned.add(name)
                    key = tracked.keys.keys(block - 1, block, group.block_hashes)[0]
                    runs.append(PageRun(place, [key], [block_id], False))


def _next(tokens: int, step: int) -> int:
    """The first multiple of `step` beyond `tokens`."""
    return tokens // step * step + step
