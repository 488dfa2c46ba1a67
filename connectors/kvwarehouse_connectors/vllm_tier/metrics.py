"""What the tier counts, for vLLM's log line and its Prometheus page. Of each tier vLLM counts as
well, under vllm:kv_offload_tiering_*."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

_PREFIX = "kvwarehouse_tier_"
COUNTERS = {
    "fetched_chunks": "Chunks that came from NVMe to DRAM for a request that waited for them.",
    "loaded_chunks": "Chunks loaded into vLLM's CPU tier, each verified.",
    "loaded_bytes": "Bytes of them.",
    "stored_chunks": "Chunks that are stored, those of others included.",
    "stored_bytes": "Bytes that were written for them: those of others are not.",
    "missed_chunks": "Chunks that were found and did not come, by reason; vLLM computes them.",
    "dropped_chunks": "Chunks that were not stored, by reason.",
    "new_epochs": "Times that nothing stored before is loaded any more: other weights, or a reset.",
}
_BY_REASON = ("missed", "dropped")


def definitions() -> dict[str, OffloadingCounterMetadata]:
    """For SecondaryTierManager.build_metric_definitions."""
    return {
        _PREFIX + name: OffloadingCounterMetadata(
            text, ("reason",) if name.partition("_")[0] in _BY_REASON else ()
        )
        for name, text in COUNTERS.items()
    }


class CountsSinceLast:
    """Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._told: Mapping[str, int] = {}

    def take(self, totals: Mapping[str, int]) -> OffloadingConnectorStats | None:
        """totals: TierCore's. None where they are what they were."""
        told, self._told = self._told, totals
        if told == totals:
            return None
        stats = OffloadingConnectorStats()
        for name, total in totals.items():
            kind, _, reason = name.partition(".")
            amount = total - told.get(name, 0)
            if amount == 0 or (not reason and kind.partition("_")[0] in _BY_REASON):
                continue  # as before, or the sum of its reasons
            if reason:
                stats.increase_counter(f"{_PREFIX}{kind}_chunks", amount, (reason,))
            else:
                stats.increase_counter(_PREFIX + name, amount)
        return stats
