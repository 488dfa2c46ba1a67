"""What the connector counts, for vLLM's log line and its Prometheus page.

A stats object holds counts since the last one was taken; vLLM adds up those of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvwarehouse_connectors.vllm.compat import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "hit_tokens_dram": "Tokens of requests whose KV the warehouse promised from DRAM.",
    "hit_tokens_nvme": "Tokens of requests whose KV the warehouse promised from NVMe.",
    "hit_tokens_remote": "Tokens of requests whose KV it promised from the remote store.",
    "failed_loads": "Requests of which a block did not come, and was computed.",
    "loaded_blocks": "Blocks loaded and verified, on every rank.",
    "missed_blocks": "Blocks that were promised and did not come, on every rank.",
    "loaded_bytes": "Bytes loaded and verified, on every rank.",
    "stored_blocks": "Blocks stored, on every rank.",
    "stored_bytes": "Bytes stored, on every rank.",
    "already_blocks": "Blocks that were stored by somebody else meanwhile, on every rank.",
    "dropped_blocks": "Blocks not stored: no room, no daemon, too slow, on every rank.",
    "device_fallbacks": "Ranks whose pages go through host memory; their log says why.",
    "released_blocks": "Stored blocks of which requests said that they are needed no more.",
    "kept_blocks": "Stored blocks that are kept because requests wished it, of all ranks one.",
    "keep_failures": "Requests that wished to be kept, and were not: nothing stored, no room.",
    "weights_changed": "Times that the engine was seen to have other weights than before.",
    "unknown_wishes": "Names and values in requests' kv_transfer_params that mean nothing.",
    "handoff_waits": "Requests that began to wait for pages of a hand-off record.",
    "handoff_complete": "Hand-off records whose pages were there, at once or after a wait.",
    "handoff_expired": "Hand-off records whose pages did not come in time; they were computed.",
    "handoff_malformed": "Hand-off records that are none.",
    "handoff_other_version": "Hand-off records of another version of the connector.",
    "handoff_other_warehouse": "Hand-off records of another daemon's warehouse.",
    "handoff_other_namespace": "Hand-off records of an engine that is set up differently.",
    "handoff_other_prompt": "Hand-off records of another prompt, salt or adapter.",
    "handoff_late": "Hand-off records that were too old to wait for.",
}


@dataclass
class WarehouseStats(KVConnectorStats):
    """data: every name of COUNTERS to its count."""

    @classmethod
    def empty(cls) -> WarehouseStats:
        return cls(data=dict.fromkeys(COUNTERS, 0))

    def add(self, name: str, amount: int = 1) -> None:
        self.data[name] += amount

    def reset(self) -> None:
        self.data = dict.fromkeys(COUNTERS, 0)

    def aggregate(self, other: KVConnectorStats) -> WarehouseStats:
        return WarehouseStats(
            data={name: self.data.get(name, 0) + other.data.get(name, 0) for name in COUNTERS}
        )

    def reduce(self) -> dict[str, int | float]:
        return {name: count for name, count in self.data.items() if count}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class WarehousePromMetrics(KVConnectorPromMetrics):
    """kvwarehouse_connector_NAME_total for each of COUNTERS, with vLLM's own labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }
            for name, counter in (
                (
                    name,
                    self._counter_cls(
                        name=f"kvwarehouse_connector_{name}",
                        documentation=text,
                        labelnames=labelnames,
                    ),
                )
                for name, text in COUNTERS.items()
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, per_engine in self._counters.items():
            amount = transfer_stats_data.get(name, 0)
            if amount:
                per_engine[engine_idx].inc(amount)
