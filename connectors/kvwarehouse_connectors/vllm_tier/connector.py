"""vLLM's OffloadingConnector, which also tells the warehouse's tiers what vLLM tells no tier: the
weights, and with each step whether they are the same; how the workers' KV lies in a row; and which
requests' KV is not to be shared.

One object in the scheduler's process and one in each worker's, as with every connector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.cache_layout import unsupported
from kvwarehouse_connectors.vllm.keys import CRYPTOGRAPHIC
from kvwarehouse_connectors.vllm.weights_watch import live_weights
from kvwarehouse_connectors.vllm_tier.handover import EngineLink, handed_over
from kvwarehouse_connectors.vllm_tier.rank_rows import RankRows, rank_rows
from kvwarehouse_connectors.vllm_tier.steps import StepVerdict, StepWatch, WatchedStep


class WarehouseOffloadingConnector(OffloadingConnector):
    """Raises UsageError at the start, naming why, where the engine's keys do not name its KV, or a
    change of its weights could not be seen."""

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
        inexact = compat.inexact_kind(kv_cache_config)
        if inexact:
            raise unsupported("this engine", inexact)
        self._link: EngineLink | None = None
        if role == compat.KVConnectorRole.SCHEDULER:
            self._link = EngineLink(vllm_config)
        with handed_over(self._link):
            super().__init__(vllm_config, role, kv_cache_config)
        self._rows: RankRows | None = None
        self._watch: StepWatch | None = None

    @property
    def _scheduler_link(self) -> EngineLink:
        assert self._link is not None, "this is a worker's connector"
        return self._link

    @property
    def _weights_watch(self) -> StepWatch:
        assert self._watch is not None, "no caches are registered"
        return self._watch

    # -- in a worker -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM computes where the KV lies, and shows it to its spec alone: so looks over the spec's
        shoulder."""
        models = compat.models_with(self._vllm_config, kv_caches)
        self._watch = StepWatch(live_weights(self._vllm_config, models))
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

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """The first that a worker hears of a step."""
        self._weights_watch.step(kv_connector_metadata)
        super().handle_preemptions(kv_connector_metadata.vllm)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata.vllm)

    def build_connector_worker_meta(self) -> Any:
        return self._weights_watch.verdict(super().build_connector_worker_meta())

    # -- in the scheduler --------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        for tier in self._scheduler_link.tiers:
            tier.rows_known(list(metadata.values()))

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler_link.epochs.watch(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._scheduler_link.begin(request)
        super().on_new_request(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        self._scheduler_link.ended(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        self._scheduler_link.ended(request)
        return super().request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> WatchedStep:
        link = self._scheduler_link
        link.step_begins()
        work = super().build_connector_meta(scheduler_output)
        works = scheduler_output.total_num_scheduled_tokens or work.load_jobs or work.store_jobs
        idle = not works and not any(tier.loading for tier in link.tiers)
        return WatchedStep(work, link.step, link.epochs.epoch, link.epochs.resets, idle)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the step's weights were is known before the tiers are given what it stored."""
        verdict = connector_output.kv_connector_worker_meta
        if isinstance(verdict, StepVerdict):
            self._scheduler_link.take(verdict)
            connector_output.kv_connector_worker_meta = verdict.vllm
        super().update_connector_output(connector_output)

    def reset_cache(self) -> bool | None:
        answer: bool | None = super().reset_cache()
        self._scheduler_link.was_reset()
        return answer
