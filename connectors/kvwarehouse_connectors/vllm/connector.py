"""The connector as vLLM knows it: a shell around the scheduler's half and the worker's.

vLLM makes one object in the scheduler's process and one in each worker's. Whatever goes wrong in a
hook after the start ends here: it is logged, and the engine computes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kvwarehouse_connectors.core.hooks import never_raises
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.compat import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    join_logs,
)
from kvwarehouse_connectors.vllm.messages import StepMetadata, StepResults
from kvwarehouse_connectors.vllm.refusals import checked_settings
from kvwarehouse_connectors.vllm.scheduler import SchedulerSide
from kvwarehouse_connectors.vllm.stats import WarehousePromMetrics, WarehouseStats
from kvwarehouse_connectors.vllm.worker import WorkerSide

_log = logging.getLogger(__name__)


class WarehouseConnector(KVConnectorBase_V1, SupportsHMA):
    """Raises UsageError at the start where a setting is bad, the model cannot be served, or
    kv_load_failure_policy is not "recompute"; never later."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_logs()
        settings = checked_settings(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, settings)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings)

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker is not None, "this is the scheduler's connector"
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is computed again."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None: any layout is served. vLLM asks before it measures and warms up; plugin.py refuses
        earlier still, where vLLM's plugins are not shut out."""
        checked_settings(vllm_config)
        return None

    @classmethod
    def supports_sleep_mode(cls, *args: Any) -> bool:
        """vLLM asks from 0.33 on whether the connector lets go of the caches' memory when the
        engine sleeps. It keeps their addresses."""
        return False

    # -- the scheduler's hooks -------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler_side.set_cache_info(metadata)

    @never_raises()
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.set_cache_manager(kv_cache_manager)

    @never_raises()
    def on_new_request(self, request: Any) -> None:
        self.scheduler_side.on_new_request(request)

    @never_raises(default=(0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables: Any = ()
        try:
            tables = blocks.get_block_ids() if num_external_tokens else ()
            self.scheduler_side.allocated(request, tables, num_external_tokens)
        except Exception:  # noqa: BLE001 - the engine's edge; it waits for this load
            _log.exception("kvwarehouse: a load could not be ordered; the engine computes it")
            if num_external_tokens:
                self.scheduler_side.refuse(request)

    @never_raises(default_factory=dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        return self.scheduler_side.hit_sources(request, num_external_tokens)

    @never_raises(default_factory=StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self.scheduler_side.step_metadata(scheduler_output)

    @never_raises()
    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        self.scheduler_side.take_results(
            meta if isinstance(meta, StepResults) else None, connector_output.finished_recving or ()
        )

    @never_raises(default=(False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler_side.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are never held back: what is to be stored was copied in the step that filled it,
        and a load's blocks vLLM itself keeps until it is reported."""
        answer: tuple[bool, dict[str, Any] | None] = self.request_finished(request, [])
        return answer

    @never_raises(default_factory=list)
    def take_events(self) -> Iterable[Any]:
        return self.scheduler_side.take_events()

    @never_raises(default=False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_work()

    @never_raises(default=False)
    def reset_cache(self) -> bool | None:
        self.scheduler_side.reset()
        return True

    # -- the worker's hooks ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.worker_side.register(kv_caches, compat.models_with(self._vllm_config, kv_caches))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker_side.cache_info()

    @never_raises()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker_side.start_loads(self._step_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return None

    @never_raises()
    def wait_for_save(self) -> None:
        self.worker_side.take_copies(self._step_metadata())

    @never_raises(default_factory=KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self.worker_side.results()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    @never_raises(default_factory=set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.bad_blocks()

    @never_raises()
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_side.step_results()

    # -- both ------------------------------------------------------------------------------------

    @never_raises()
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._worker.stats() if self._worker is not None else self.scheduler_side.step_ends()

    @never_raises()
    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return WarehouseStats(data=data) if data is not None else WarehouseStats.empty()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> WarehousePromMetrics:
        return WarehousePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _step_metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata), f"metadata is {type(metadata).__name__}"
        return metadata
