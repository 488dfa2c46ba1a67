"""The connector as TensorRT-LLM knows it: shells around the scheduler's half and the worker's.

Whatever goes wrong in a hook after the start ends here, logged, and the engine computes; but for a
promised load that does not come, which the engine could not compute instead: that raises.
"""

from __future__ import annotations

import os
from typing import Any

from kvwarehouse_connectors.core.hooks import never_raises
from kvwarehouse_connectors.trtllm import arguments, compat
from kvwarehouse_connectors.trtllm.messages import TrtllmStepMetadata
from kvwarehouse_connectors.trtllm.scheduler import SchedulerSide
from kvwarehouse_connectors.trtllm.settings import Settings, read_settings
from kvwarehouse_connectors.trtllm.worker import WorkerSide


def _settings(llm_args: Any) -> Settings:
    """Raises UsageError where a setting is bad or the engine cannot be served."""
    problem = arguments.engine_problem(llm_args)
    if problem:
        raise compat.unsupported("this engine", problem)
    return read_settings(os.environ, arguments.server_url(llm_args))


class WarehouseScheduler(compat.KvCacheConnectorScheduler):
    """On rank 0. Raises UsageError at the start where a setting is bad or the engine cannot be
    served; RuntimeError later only where what was promised has no blocks."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.side = SchedulerSide(llm_args, _settings(llm_args))

    def wait_for_initialization(self) -> None:
        self.side.check_cache_info()

    @never_raises(default=(0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return self.side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        self.side.allocated(request, [block_ids])

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        self.side.allocated(request, block_ids_by_layer_group)

    def build_connector_meta(self, scheduler_output: Any) -> TrtllmStepMetadata:
        # Not guarded: an order that is lost would be a promise broken in silence.
        return self.side.step_metadata(scheduler_output)

    @never_raises(default=False)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return self.side.finished(request)

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        return bool(self.request_finished(request, []))

    @never_raises()
    def request_reset(self, request: Any) -> None:
        self.side.reset(request)

    @never_raises()
    def cancel_load(self, request: Any, start: int, end: int) -> None:
        self.side.cancelled(request, start)

    @never_raises()
    def shutdown(self) -> None:
        """Not called by TensorRT-LLM, whose processes end."""
        self.side.close()


class WarehouseWorker(compat.KvCacheConnectorWorker):
    """On every rank. Raises UsageError at the start as WarehouseScheduler does; RuntimeError later
    only where a promised load does not come."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.side = WorkerSide(llm_args, _settings(llm_args))

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        self.side.register_pool(kv_cache_tensor)

    def register_kv_cache_layout(self, layout: Any) -> None:
        self.side.register_layout(layout)

    def start_load_kv(self, stream: Any) -> None:
        self.side.start_loads(self._step_metadata())

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """What a step needs is there before its first layer."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """A block is stored whole, when its last layer is done."""

    @never_raises()
    def wait_for_save(self, stream: Any) -> None:
        self.side.take_copies(self._step_metadata())

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        return self.side.finished(finished_gen_req_ids, started_loading_req_ids)

    @never_raises()
    def shutdown(self) -> None:
        """Not called by TensorRT-LLM, whose processes end."""
        self.side.close()

    def _step_metadata(self) -> TrtllmStepMetadata:
        metadata = self.get_connector_meta()
        return metadata if isinstance(metadata, TrtllmStepMetadata) else TrtllmStepMetadata()


for _shell in (WarehouseScheduler, WarehouseWorker):
    compat.check_interface(_shell)
