"""The worker's half: fills blocks from the warehouse, and takes copies of blocks to be stored.

The engine's thread only queues loads and copies the blocks of a store to the ring; all that waits
for the warehouse has threads of its own. One per rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.core.layout_self_test import check_tensors
from kvwarehouse_connectors.core.memory import BlockMemory
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.self_test import SelfTest
from kvwarehouse_connectors.core.store_queue import StoreQueue
from kvwarehouse_connectors.core.tensor_memory import TensorMemories
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.cache_layout import block_layout, cache_groups, unsupported
from kvwarehouse_connectors.vllm.loads import LoadOptions, Loads
from kvwarehouse_connectors.vllm.messages import CacheInfo, GroupInfo, StepMetadata, StepResults
from kvwarehouse_connectors.vllm.results import Results
from kvwarehouse_connectors.vllm.settings import Settings
from kvwarehouse_connectors.vllm.staging import needed_bytes, usual_bytes
from kvwarehouse_connectors.vllm.stats import WarehouseStats
from kvwarehouse_connectors.vllm.weights_watch import Ticket, WeightsWatch, live_weights

_log = logging.getLogger(__name__)


class WorkerSide:
    """Raises UsageError where this engine cannot be served, naming why."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self._vllm_config = vllm_config
        self._settings = settings
        self._kv_cache_config = kv_cache_config
        self._groups = cache_groups(kv_cache_config)
        self._shard, stores = compat.shard(vllm_config, kv_cache_config)
        self._shards = compat.shards(vllm_config, kv_cache_config)
        self._stores = settings.stores and stores
        self._connection = DaemonConnection(
            settings.address,
            ConnectionOptions(verify=settings.verify, read_only=not settings.stores),
        )
        self._wants_events = compat.publishes_events(vllm_config)
        self._memories: list[BlockMemory] = []
        self._tensors: TensorMemories | None = None
        self._cache_info: CacheInfo | None = None
        self._spaces: tuple[kvw.Namespace, ...] = ()
        self._self_test = SelfTest(self._connection, stores=settings.stores)
        self._results = Results()
        # A part of a load is of no use where there are several groups, or a window, whose blocks
        # before the last ones were never loaded.
        whole = len(self._groups) > 1 or not self._groups[0].chained
        self._loads = Loads(
            self._connection,
            self._self_test,
            self._memories,
            self._results,
            LoadOptions(whole, self._shard, settings.load_timeout_s),
        )
        self._store_queue: StoreQueue | None = None
        self._watch: WeightsWatch | None = None
        self._ticket: Ticket | None = None  # this step's; None: its weights could not be read

    # -- once ----------------------------------------------------------------------------------

    def register(self, caches: Mapping[str, Any], models: Sequence[torch.nn.Module]) -> None:
        """caches: the engine's cache tensors, by layer. models: whose layers they are. Proves that
        blocks keep their bytes on the way; raises UsageError where they do not, or where the
        models' weights cannot be read."""
        self._watch = WeightsWatch(live_weights(self._vllm_config, models), self._results.saw)
        config, blocks = self._vllm_config, self._kv_cache_config.num_blocks
        order = str(config.cache_config.kv_cache_layout or "")
        made = self._tensors = TensorMemories(
            self._settings.device_copies, lambda: self._results.count(device_fallbacks=1)
        )
        groups = []
        for group in self._groups:
            layout = block_layout(dict(caches), group.layer_names, blocks, order)
            views = [compat.by_manager_block(tensor, blocks) for tensor in layout.tensors]
            device = views[0].device.type
            memory = made.memory(layout, views, blocks)
            self._memories.append(memory)
            if made.device_address:
                self._connection.prepare_device(made.device_address)
            check_tensors(memory, views, blocks)
            if not self._self_test.round_trip(memory, range(blocks)[-2:]):
                raise unsupported("this engine", "gets other bytes back than it stored (self-test)")
            spec = compat.group_spec(self._kv_cache_config.kv_cache_groups[group.index])
            backend = compat.attention_backends(config, group.layer_names)
            if device == "cpu":
                backend = f"{backend}/{compat.instruction_set(config, spec)}"
            groups.append(
                GroupInfo(
                    page_bytes=memory.block_bytes,
                    layout=layout.name,
                    kv_dtype=_kv_dtype(config, views[0]),
                    attention_backend=backend,
                    layer_names=group.layer_names,
                )
            )
        self._settings = replace(self._settings, staging_bytes=self._staging_bytes(views[0].device))
        self._check_staging()
        self._store_queue = StoreQueue(self._connection, self._settings, self._shard, self._stored)
        self._cache_info = CacheInfo(tuple(groups), device, self._settings.staging_bytes)

    def _staging_bytes(self, device: torch.device) -> int:
        """What the setting says, else what the largest step needs; the log says where that is
        more."""
        step_tokens = int(self._vllm_config.scheduler_config.max_num_batched_tokens)
        blocks = [memory.block_bytes for memory in self._memories]
        needed = needed_bytes(self._groups, blocks, step_tokens)
        chosen = self._settings.staging_bytes or usual_bytes(needed, self._memory_bytes(device))
        if self._stores and chosen < needed:
            _log.warning(
                "kvwarehouse: a step of %d tokens (max_num_batched_tokens) can fill more blocks"
                " than a worker stores of one step with kvwarehouse.staging_bytes of %s. The rest"
                " of such a prompt is stored with the next steps of its request, or dropped"
                " (dropped_blocks) if that ends before, as on a prefill node. Set"
                ' "kvwarehouse.staging_bytes": "%dMiB", or make steps shorter',
                step_tokens,
                kvw.format_size(chosen),
                -(-needed >> 20),
            )
        return chosen

    def _memory_bytes(self, device: torch.device) -> int:
        """Of a GPU that pages go straight from; else this rank's share of the host's, where the
        copies are then."""
        if self._tensors is not None and self._tensors.device_address:
            return int(torch.cuda.get_device_properties(device).total_memory)
        ranks = int(self._vllm_config.parallel_config.world_size)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks

    def _check_staging(self) -> None:
        """A step may fill half of the ring: the other half is then on its way."""
        least = 2 * max(memory.block_bytes for memory in self._memories)
        if self._stores and self._settings.staging_bytes < least:
            raise kvw.UsageError(
                f"kvwarehouse.staging_bytes is {self._settings.staging_bytes}: no block of this"
                f" model, of {least // 2} bytes, could be stored. Use at least {least}; by default"
                " it follows from the model",
                code="bad_setting",
            )

    def cache_info(self) -> CacheInfo | None:
        return self._cache_info

    # -- each step ---------------------------------------------------------------------------

    def start_loads(self, metadata: StepMetadata) -> None:
        """Called before take_copies in every step."""
        self._spaces = metadata.spaces or self._spaces
        self._ticket = self._sampled(metadata)
        for order in metadata.loads:
            self._loads.begin(order, self._spaces, partial(self._right_weights, self._ticket))

    def take_copies(self, metadata: StepMetadata) -> None:
        """Copies the blocks to be stored: the engine may write them again when this returns."""
        queue = self._store_queue
        if not metadata.stores or not self._stores or queue is None:
            return
        for group, memory in enumerate(self._memories):
            runs = [run for run in metadata.stores if run.group == group]
            if runs and not queue.put(
                runs, self._spaces[group], memory, partial(self._right_weights, self._ticket)
            ):
                self._results.count(dropped_blocks=sum(len(run.blocks) for run in runs))

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended since the last call, and those of them that failed as a
        whole."""
        return self._results.take_requests()

    def bad_blocks(self) -> set[int]:
        return self._results.take_bad_blocks()

    def step_results(self) -> StepResults | None:
        return self._results.take_step_results()

    def stats(self) -> WarehouseStats | None:
        return self._results.take_stats()

    def close(self) -> None:
        """Ends the threads: loads under way end by their own bounds, stores that are queued are
        made within their timeout."""
        self._loads.close()
        if self._store_queue is not None:
            self._store_queue.close()
        if self._tensors is not None:
            self._tensors.close()
        self._connection.close()

    # -- inside --------------------------------------------------------------------------------

    def _sampled(self, metadata: StepMetadata) -> Ticket | None:
        try:
            assert self._watch is not None, "no caches are registered"
            if metadata.idle:
                self._watch.look()
                return None
            return self._watch.step(metadata.epoch, metadata.resets)
        except Exception:  # noqa: BLE001 - the engine's edge; it waits for this step's loads
            _log.exception(
                "kvwarehouse: the weights could not be read; nothing is loaded or stored"
            )
            return None

    def _right_weights(self, ticket: Ticket | None) -> bool:
        """In the loading and storing threads."""
        assert self._watch is not None
        return ticket is not None and self._watch.good(ticket)

    # -- in the storing thread -----------------------------------------------------------------

    def _stored(self, runs: list[PageRun], result: kvw.StoreResult) -> None:
        page_bytes = self._memories[runs[0].group].block_bytes
        self._results.count(
            stored_blocks=result.stored,
            stored_bytes=result.stored * page_bytes,
            already_blocks=result.already,
            dropped_blocks=result.dropped_pages,
        )
        if self._wants_events and not result.dropped_pages:
            self._results.stored((run.group, key) for run in runs for key in run.keys)
        elif self._wants_events and result.stored + result.already:
            self._announce_present(runs)

    def _announce_present(self, runs: list[PageRun]) -> None:
        """After a store in part, of which nobody says which pages it left out. What is there, every
        rank has stored."""
        group = runs[0].group
        try:
            opened = self._connection.namespace(self._spaces[group])
            if opened is None:
                return
            keys = [part for run in runs for part in run.key_runs()]
            tiers = opened.tiers(keys=keys, counted=False)
        except kvw.WarehouseError as error:
            _log.debug("blocks of a step are not announced: %s", error)
            return
        names = [(group, key) for run in runs for key in run.keys]
        self._results.stored(
            (name for name, known in zip(names, kvw.Tier.here(tiers), strict=True) if known),
            self._shards,
        )


def _kv_dtype(vllm_config: Any, view: torch.Tensor) -> str:
    cached = str(vllm_config.cache_config.cache_dtype)
    return f"{str(view.dtype).removeprefix('torch.')}/{cached}"
