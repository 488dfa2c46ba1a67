"""What a bench asks of an engine, and what it answers. Plain values, as JSON between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Counts = Mapping[str, float]
"""Counters of the engine by name (and source, where they have that label)."""


@dataclass(frozen=True)
class Ask:
    """Greedy, to the last of max_tokens."""

    tokens: Sequence[int]
    max_tokens: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)
    """kv_transfer_params."""


@dataclass(frozen=True)
class EngineReply:
    """Of one call, which may have had several asks."""

    seconds: float
    """Wall time of the whole call."""
    ttft_s: Sequence[float]
    """Of each ask, from its arrival to its first token."""
    counts: Counts
    """What the call added to the engine's counters."""
    params: Mapping[str, Any] | None = None
    """kv_transfer_params of the first ask's answer; not read off streams."""


DEVICE = "vllm:prompt_tokens_cached_by_source_total/device"
HOST = "vllm:prompt_tokens_cached_by_source_total/host"
DISK = "vllm:prompt_tokens_cached_by_source_total/disk"
"""Tokens of prompts by the tier that they came from, as vLLM 0.32 counts them at admission."""
LOADED_BLOCKS = "kvwarehouse_connector_loaded_blocks_total"
MISSED_BLOCKS = "kvwarehouse_connector_missed_blocks_total"
"""Blocks that the connector was to load and that came, and that did not: they were computed."""
HANDOFFS = "kvwarehouse_connector_handoff_"
"""Begin of the counters of hand-off records, by how it ended with them."""
_KEPT = ("vllm:prompt_tokens_cached_by_source_total", "kvwarehouse_connector_")


def counts_now() -> dict[str, float]:
    """Of the engine whose process this is."""
    from prometheus_client import REGISTRY

    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return summed((sample.name, sample.labels, sample.value) for sample in samples)


def summed(samples: Any) -> dict[str, float]:
    """The counters of (name, labels, value) that a bench looks at."""
    found: dict[str, float] = {}
    for name, labels, value in samples:
        if name.startswith(_KEPT) and name.endswith("_total"):
            source = labels.get("source")
            key = f"{name}/{source}" if source else name
            found[key] = found.get(key, 0.0) + value
    return found


def difference(after: Counts, before: Counts) -> dict[str, float]:
    changed = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: value for name, value in changed.items() if value}
