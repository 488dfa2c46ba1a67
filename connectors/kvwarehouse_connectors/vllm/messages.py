"""What the two halves of the connector tell each other, each step. Pickled by vLLM: plain values.

The scheduler sends StepMetadata. The workers send CacheInfo once, and StepResults with each step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import kvwarehouse as kvw
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.vllm.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from kvwarehouse_connectors.vllm.weights_watch import WeightsNews


@dataclass(frozen=True)
class GroupInfo:
    """What a worker sees of a cache group in its own tensors."""

    page_bytes: int
    layout: str
    kv_dtype: str
    attention_backend: str
    layer_names: tuple[str, ...] = ()
    """Of the group, those of the worker's pipeline stage."""


@dataclass(frozen=True)
class CacheInfo(KVConnectorHandshakeMetadata):
    """A worker's part of the namespaces' identity: the same on all ranks but for the layers of
    pipeline stages, or the start fails."""

    groups: tuple[GroupInfo, ...]
    """In the order of groups.cache_groups."""
    device: str
    staging_bytes: int


@dataclass(frozen=True)
class LoadOrder:
    """One request's load. Its blocks are the worker's until it reports the request."""

    request_id: str
    runs: tuple[PageRun, ...]
    page_compute_s: float = 0.0
    """What computing a block of the first run would cost; 0: no schedule, only the timeout."""
    from_nvme: bool = False
    """Whether a block was not in DRAM when it was found."""
    from_remote: bool = False
    """Whether one was only in the remote store: how fast the load is says nothing of the tiers
    here."""
    refused: bool = False
    """Whether it went wrong before it began: it is reported as failed, and has no runs."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's work."""

    spaces: tuple[kvw.Namespace, ...] = ()
    """With the first work; they hold from then on."""
    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[PageRun] = field(default_factory=list)
    epoch: int = 0
    resets: int = 0
    """What its keys are of: see weights_watch.py."""
    idle: bool = False
    """Whether it computes, loads and stores nothing. Its weights may be unmapped: an engine that
    sleeps makes such steps."""


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """What became of loads and stores since the last step, of one rank or, aggregated, of all."""

    failed: set[str] = field(default_factory=set)
    """Requests of which a block did not come."""
    load_bytes_per_s: float = 0.0
    """Of loads that were all in DRAM; the slowest rank's. 0: none since the last step."""
    nvme_bytes_per_s: float = 0.0
    stored: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    """(group, key) to ranks that stored it; only where events are wanted."""
    weights: WeightsNews = field(default_factory=WeightsNews)

    def __bool__(self) -> bool:
        return self != StepResults()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResults:
        assert isinstance(other, StepResults)
        return StepResults(
            self.failed | other.failed,
            _slower(self.load_bytes_per_s, other.load_bytes_per_s),
            _slower(self.nvme_bytes_per_s, other.nvme_bytes_per_s),
            self.stored + other.stored,
            self.weights.and_also(other.weights),
        )


def _slower(one: float, other: float) -> float:
    return min(one, other) if one and other else one or other
