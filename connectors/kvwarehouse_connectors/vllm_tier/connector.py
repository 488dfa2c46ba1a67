"""vLLM's OffloadingConnector, which also tells the warehouse's tiers what vLLM tells no tier: the
weights, how the workers' KV lies in a row, and which requests' KV is not to be shared.

One object in the scheduler's process and one in each worker's, as with every connector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.cache_layout import unsupported
from kvwarehouse_connectors.vllm.keys import CRYPTOGRAPHIC
from kvwarehouse_connectors.vllm_tier.handover import EngineLink, handed_over
from kvwarehouse_connectors.vllm_tier.rank_rows import RankRows, rank_rows


class WarehouseOffloadingConnector(OffloadingConnector):
    """Raises UsageError at the start, naming why, where the engine's keys do not name its KV."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        compat.join_logs()
        algorithm = compat.hash_algorithm(vllm_config)
        if algorithm not in CRYPTOGRAPHIC:
            raise unsupported(
                "this engine",
                f"names blocks by {algorithm}, which may be the same for other tokens (use"
                f" --prefix-caching-hash-algo {CRYPTOGRAPHIC[0]})",
            )
        if vllm_config.model_config.is_encoder_decoder:
            raise unsupported("this engine", "is an encoder-decoder model")
        self._link: EngineLink | None = None
        if role == compat.KVConnectorRole.SCHEDULER:
            self._link = EngineLink(vllm_config)
        with handed_over(self._link):
            super().__init__(vllm_config, role, kv_cache_config)
        self._rows: RankRows | None = None

    # -- in a worker -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM computes where the KV lies, and shows it to its spec alone: so looks over the spec's
        shoulder."""
        spec = self.connector_worker.spec
        seen: list[Any] = []
        get_worker = spec.get_worker

        def watched(canonical: Any) -> Any:
            seen.append(canonical)
            return get_worker(canonical)

        spec.get_worker = watched
        try:
            super().register_kv_caches(kv_caches)
        finally:
            del spec.get_worker
        config = self._vllm_config
        self._rows = rank_rows(config, self._kv_cache_config, spec, seen[-1], kv_caches)

    def get_handshake_metadata(self) -> compat.KVConnectorHandshakeMetadata | None:
        return self._rows

    # -- in the scheduler --------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        assert self._link is not None, "this is a worker's connector"
        for tell in self._link.tiers:
            tell(list(metadata.values()))

    def on_new_request(self, request: Any) -> None:
        if self._link is not None:
            self._link.begin(request)
        super().on_new_request(request)
