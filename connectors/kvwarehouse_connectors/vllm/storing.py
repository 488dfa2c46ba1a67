"""What to store of each step: blocks that it fills, in all groups, as they are filled.

Full attention is stored block after block and may be caught up with in a later step; blocks of a
window are gone from the table in the next step, and states are handed over by vLLM at their
boundaries, so those are stored in the step that fills them or not at all. Runs in the scheduler's
thread alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.prefix_matcher import PrefixMatcher, consecutive, page_run
from kvwarehouse_connectors.vllm.events import StoreEvents
from kvwarehouse_connectors.vllm.settings import Settings
from kvwarehouse_connectors.vllm.tracked import Tracked

WANT_HANDOFF = "kvwarehouse.handoff"


class StorePlanner:
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
        self._groups = groups
        self._page_bytes = [space.page_bytes for space in spaces]
        self._settings = settings
        self._step_bytes = step_bytes
        self._events = events
        self._least_tokens = min(group.block_tokens for group in groups)
        self._planned: set[tuple[int, bytes]] = set()  # requests of a step may share blocks
        self._states = [p for p, group in enumerate(groups) if group.rule is Rule.STATE]

    def plan(
        self, step: Any, requests: Mapping[str, Tracked], matcher: PrefixMatcher, epoch: int
    ) -> list[PageRun]:
        """The blocks that are full when this step has run. Cheap for requests that fill none."""
        runs: list[PageRun] = []
        left = self._step_bytes
        self._planned.clear()
        for request_id, scheduled in step.num_scheduled_tokens.items():
            tracked = requests.get(request_id)
            if tracked is None or not tracked.stores or tracked.epoch != epoch:
                continue
            computed = tracked.request.num_computed_tokens + scheduled
            if computed < tracked.next_tokens:
                continue
            tables = step.kv_connector_block_state.get_block_ids(request_id)
            if tables is not None:
                left = self._request(tracked, computed, tables, matcher, runs, left)
        if self._states:
            self._boundaries(step, requests, matcher, epoch, runs)
        return runs

    def handoff_wanted(self, tracked: Tracked) -> bool:
        """A producer always says what it stored; others where the request asks."""
        params = tracked.request.kv_transfer_params or {}
        asked = not self._settings.loads or params.get(WANT_HANDOFF) is True
        return tracked.stores and asked

    def stored_tokens(self, tracked: Tracked) -> int:
        """Tokens from the first on that were given to be stored, at whole blocks of all groups; 0
        of a model of states alone, which are stored at ends of chunks, not at every block."""
        groups = zip(self._groups, tracked.considered, strict=True)
        stored = (done * one.block_tokens for one, done in groups if one.rule is not Rule.STATE)
        return min(stored, default=0)

    def _request(
        self,
        tracked: Tracked,
        computed: int,
        tables: Sequence[Sequence[int]],
        matcher: PrefixMatcher,
        runs: list[PageRun],
        left: int,
    ) -> int:
        """Adds what one request has; returns the bytes that are left for others."""
        if not self._settings.store_generated:
            computed = min(computed, tracked.request.num_prompt_tokens)
        behind = False
        for place, group in enumerate(self._groups):
            if group.rule is Rule.STATE:
                continue
            table = tables[group.index]
            full = computed // group.block_tokens
            end = min(full, tracked.keys.count(group.block_hashes), len(table))
            behind = behind or end < full  # its last token is not known yet
            fresh = [b for b in range(tracked.considered[place], end) if table[b]]
            wanted = matcher.missing(place, tracked.keys, fresh) if fresh else []
            wanted = [b for b in wanted if self._name(place, tracked, b) not in self._planned]
            room = max(0, left) // self._page_bytes[place]
            if group.chained and len(wanted) > room:
                behind = True
                end = wanted[room]
            taken = wanted[:room]
            self._planned.update(self._name(place, tracked, block) for block in taken)
            left -= len(taken) * self._page_bytes[place]
            tracked.considered[place] = max(end, tracked.considered[place])
            parts = consecutive(taken) if group.chained else [taken] if taken else []
            for part in parts:
                run = page_run(place, group, tracked.keys, part, table)
                runs.append(run)
                self._events.ordered(tracked.request, group, part, run.keys)
        tracked.next_tokens = 0 if behind else _next(computed, self._least_tokens)
        return left

    def _name(self, place: int, tracked: Tracked, block: int) -> tuple[int, bytes]:
        """What the same block of another request has too."""
        each = self._groups[place].block_hashes
        return place, tracked.keys.keys(block, block + 1, each)[0]

    def _boundaries(
        self,
        step: Any,
        requests: Mapping[str, Tracked],
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
