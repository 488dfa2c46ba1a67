"""An engine's steps without an engine: tables of blocks as vLLM makes and nulls them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.output import KVConnectorBlockState

from kvwarehouse_connectors.core.groups import CacheGroup, Rule
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.vllm.keys import RequestKeys, chain_for
from kvwarehouse_connectors.vllm.tracked import VllmRequest

_ids = itertools.count(1)


@dataclass
class Running:
    """A request on its way: `steps` are made by `plan`, which asks the planner as the scheduler
    does before it counts the step's tokens as computed."""

    request: Any
    groups: Sequence[CacheGroup]
    tracked: VllmRequest = field(init=False)
    tables: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        hash_tokens = self.groups[0].hash_tokens
        self.tracked = VllmRequest(
            request=self.request,
            keys=RequestKeys(self.request, chain_for("sha256", hash_tokens)(), b""),
            loads=True,
            stores=True,
            epoch=0,
            considered=[0] * len(self.groups),
        )
        self.tables = [[] for _ in self.groups]

    @property
    def computed(self) -> int:
        return int(self.request.num_computed_tokens)

    def schedule(self, count: int) -> None:
        """Gives it the blocks for `count` more tokens, and takes those it does not read any more,
        as vLLM does: what a step reads is there while it runs."""
        end = self.computed + count
        for group in self.groups:
            table = self.tables[group.index]
            while len(table) * group.block_tokens < end:
                table.append(next(_ids))
            first = max(0, self._skipped(group) // group.block_tokens)
            for place in range(min(first, len(table))):
                table[place] = 0

    def _skipped(self, group: CacheGroup) -> int:
        if group.rule is Rule.WINDOW:
            return self.computed - group.reach_tokens + 1
        if group.rule is Rule.CHUNK:
            return self.computed // group.reach_tokens * group.reach_tokens
        return 0

    def preempted(self) -> None:
        """Its blocks are gone, and it begins anew."""
        self.tables = [[] for _ in self.groups]
        self.request.num_computed_tokens = 0


def step(
    scheduled: dict[str, int],
    running: dict[str, Running],
    offers: dict[str, list[tuple[int, int, int]]] | None = None,
) -> Any:
    """A SchedulerOutput, as far as a connector reads it. offers: states at boundaries."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        kv_connector_block_state=KVConnectorBlockState(
            req_ids={*scheduled, *(offers or {})},
            resolve_block_ids=lambda name: tuple(list(table) for table in running[name].tables),
            boundary_state_offloads=offers or {},
        ),
    )


class FakeMatcher:
    """Stands in for the matcher: what is stored, by group and key. Takes what is given to it."""

    def __init__(self) -> None:
        self.stored: set[tuple[int, bytes]] = set()
        self.groups: Sequence[CacheGroup] = ()

    def missing(self, place: int, keys: RequestKeys, wanted: Sequence[int]) -> list[int]:
        each = self.groups[place].block_hashes
        return [
            block
            for block in wanted
            if (place, keys.keys(block, block + 1, each)[0]) not in self.stored
        ]

    def take(self, runs: Sequence[PageRun]) -> None:
        self.stored.update((run.group, bytes(key)) for run in runs for key in run.keys)
