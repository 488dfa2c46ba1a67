"""The worker's half: fills blocks from the warehouse, and takes copies of blocks to be stored.

The engine's thread only queues loads and copies the blocks of a store to the ring; all that waits
for the warehouse has threads of its own. One per rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import kvwarehouse as kvw
from kvwarehouse_connectors.common.loading import LoadResult, load_in_time
from kvwarehouse_connectors.common.upkeep import Upkeep, UpkeepOptions
from kvwarehouse_connectors.common.worth import Schedule
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.groups import cache_groups, unsupported
from kvwarehouse_connectors.vllm.layout import block_layout
from kvwarehouse_connectors.vllm.memory import BlockMemory, DeviceMemory, HostMemory
from kvwarehouse_connectors.vllm.messages import (
    Facts,
    GroupFacts,
    LoadOrder,
    Orders,
    Outcomes,
    PageRun,
)
from kvwarehouse_connectors.vllm.outbox import Outbox
from kvwarehouse_connectors.vllm.proof import Proof
from kvwarehouse_connectors.vllm.settings import Settings
from kvwarehouse_connectors.vllm.stats import WarehouseStats

_log = logging.getLogger(__name__)

# Loads side by side. Those that wait for NVMe have threads of their own: they must not keep out
# what only has to be copied.
_COPIERS = 2
_WAITERS = 16
# A load of so much from DRAM alone is made in two halves by two threads: one does not reach what
# the memory delivers.
_HALVED_BYTES = 4 << 20
# Of computing a prefix: how long a load that is of use only as a whole may take.
_WHOLE_SHARE = 0.5
# A load's bytes below this say nothing of a tier's speed.
_TELLING_BYTES = 1 << 20


@dataclass
class _Done:
    """What happened since it was last taken."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    outcomes: Outcomes = field(default_factory=Outcomes)


class WorkerSide:
    """Raises UsageError where this engine cannot be served, naming why."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self._vllm_config = vllm_config
        self._settings = settings
        self._kv_cache_config = kv_cache_config
        self._groups = cache_groups(kv_cache_config)
        # Whether a part of a load is of no use: of several groups, or of a window, whose blocks
        # before the last ones were never loaded.
        self._whole = len(self._groups) > 1 or not self._groups[0].chained
        replicas = compat.tp_replicas(kv_cache_config)
        rank = int(vllm_config.parallel_config.rank) % int(
            vllm_config.parallel_config.tensor_parallel_size
        )
        self._shard = rank // replicas
        self._stores = settings.stores and rank % replicas == 0
        self._upkeep = Upkeep(
            settings.address,
            UpkeepOptions(verify=settings.verify, read_only=not settings.stores),
        )
        self._lock = threading.Lock()
        self._done = _Done()
        self._stats = WarehouseStats.empty()
        self._wants_events = compat.publishes_events(vllm_config)
        self._memories: list[BlockMemory] = []
        self._facts: Facts | None = None
        self._spaces: tuple[kvw.Namespace, ...] = ()
        self._proof = Proof(self._upkeep, stores=settings.stores)
        self._copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="kvw-copy")
        self._waiters = ThreadPoolExecutor(_WAITERS, thread_name_prefix="kvw-wait")
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="kvw-half")
        self._helper_free = threading.Semaphore()
        self._outbox = Outbox(self._upkeep, settings, self._shard, self._stored)

    # -- once ----------------------------------------------------------------------------------

    def register(self, caches: Mapping[str, Any]) -> None:
        """The engine's cache tensors, by layer. Proves that blocks keep their bytes on the way;
        raises UsageError where they do not."""
        config, blocks = self._vllm_config, self._kv_cache_config.num_blocks
        order = str(config.cache_config.kv_cache_layout or "")
        facts = []
        for group in self._groups:
            layout = block_layout(dict(caches), group.layer_names, blocks, order)
            views = [compat.by_manager_block(tensor, blocks) for tensor in layout.tensors]
            device = views[0].device.type
            memory: BlockMemory = HostMemory(layout) if device == "cpu" else DeviceMemory(views)
            self._memories.append(memory)
            self._proof.check(memory, views, blocks)
            if not self._proof.of_the_way(memory, range(blocks)[-2:]):
                raise unsupported("this engine", "gets other bytes back than it stored (self-test)")
            spec = compat.group_spec(self._kv_cache_config.kv_cache_groups[group.index])
            backend = compat.attention_backends(config, group.layer_names)
            if device == "cpu":
                backend = f"{backend}/{compat.instruction_set(config, spec)}"
            facts.append(
                GroupFacts(
                    page_bytes=memory.block_bytes,
                    layout=layout.name,
                    kv_dtype=_kv_dtype(config, views[0]),
                    attention_backend=backend,
                )
            )
        self._check_staging()
        self._facts = Facts(tuple(facts), device, self._settings.staging_bytes)

    def _check_staging(self) -> None:
        """A step may fill half of the ring: the other half is then on its way."""
        least = 2 * max(memory.block_bytes for memory in self._memories)
        if self._stores and self._settings.staging_bytes < least:
            raise kvw.UsageError(
                f"kvwarehouse.staging_bytes is {self._settings.staging_bytes}: no block of this"
                f" model, of {least // 2} bytes, could be stored. Use at least {least}; the default"
                ' is "256MiB"',
                code="bad_setting",
            )

    def facts(self) -> Facts | None:
        return self._facts

    # -- each step ---------------------------------------------------------------------------

    def start_loads(self, orders: Orders) -> None:
        """Called before take_copies in every step."""
        self._spaces = orders.spaces or self._spaces
        for order in orders.loads:
            try:
                for memory in self._memories:
                    memory.after_engine()
                pool = self._waiters if order.from_nvme else self._copiers
                pool.submit(self._load, order, time.monotonic())
            except Exception:  # noqa: BLE001 - the engine's edge; it waits for this load
                _log.exception("kvwarehouse: a load could not be begun")
                self._report(order, [])

    def take_copies(self, orders: Orders) -> None:
        """Copies the blocks to be stored: the engine may write them again when this returns."""
        if not orders.stores or not self._stores:
            return
        for group, memory in enumerate(self._memories):
            runs = [run for run in orders.stores if run.group == group]
            if runs and not self._outbox.put(runs, self._spaces[group], memory):
                self._stats_add(dropped_blocks=sum(len(run.blocks) for run in runs))

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended since the last call, and those of them that failed as a
        whole."""
        with self._lock:
            received, failed = self._done.received, self._done.failed
            self._done.received, self._done.failed = set(), set()
        return received, failed

    def bad_blocks(self) -> set[int]:
        with self._lock:
            bad, self._done.bad_blocks = self._done.bad_blocks, set()
        return bad

    def outcomes(self) -> Outcomes | None:
        with self._lock:
            outcomes, self._done.outcomes = self._done.outcomes, Outcomes()
        return outcomes if outcomes else None

    def stats(self) -> WarehouseStats | None:
        with self._lock:
            if self._stats.is_empty():
                return None
            stats, self._stats = self._stats, WarehouseStats.empty()
        return stats

    def close(self) -> None:
        """Ends the threads: loads under way end by their own bounds, stores that are queued are
        made within their timeout."""
        self._copiers.shutdown(wait=True, cancel_futures=True)
        self._waiters.shutdown(wait=True, cancel_futures=True)
        self._helper.shutdown(wait=True)
        self._outbox.close()
        self._upkeep.close()

    # -- in the loading threads ----------------------------------------------------------------

    def _load(self, order: LoadOrder, begin_s: float) -> None:
        """One request's load, from begin to report. Whatever happens, it is reported. begin_s: when
        it was ordered, from where on its schedule counts."""
        results: list[LoadResult] = []
        try:
            for run in order.runs:
                results.append(self._load_run(order, run, begin_s))
                if results[-1].pages < len(run.blocks):
                    break
        except Exception as error:  # noqa: BLE001 - a thread's edge: what did not come is computed
            for space in self._spaces:
                self._upkeep.doubt(space, error)
            level = logging.DEBUG if isinstance(error, kvw.WarehouseError) else logging.ERROR
            _log.log(level, "a load failed: %s: %s", type(error).__name__, error)
        self._report(order, results)

    def _load_run(self, order: LoadOrder, run: PageRun, begin_s: float) -> LoadResult:
        opened = self._upkeep.wait_opened(self._spaces[run.group], self._settings.load_timeout_s)
        if opened is None:
            return LoadResult(0, 0.0, {"unreachable": len(run.blocks)})
        memory = self._memories[run.group]
        if not self._proof.of_the_way(memory, run.blocks):
            return LoadResult(0, 0.0, {"self_test": len(run.blocks)})
        schedule, most_s = self._schedule(order, run)

        def load(begin: int, end: int) -> LoadResult:
            part = run.cut(begin, end)
            return load_in_time(
                lambda first, timeout_s: memory.load(opened, part, first, self._shard, timeout_s),
                end - begin,
                schedule.after(begin),
                most_s,
                begin_s=begin_s,
            )

        pages = len(run.blocks)
        large = pages > 1 and pages * memory.block_bytes >= _HALVED_BYTES
        if large and memory.takes_loads_at_once and not order.from_nvme:
            return self._halved(load, pages)
        return load(0, pages)

    def _halved(self, load: Callable[[int, int], LoadResult], pages: int) -> LoadResult:
        """load(begin, end) in two halves, the second in a thread that helps where it is free."""
        if not self._helper_free.acquire(blocking=False):
            return load(0, pages)
        middle = pages // 2
        try:
            second = self._helper.submit(load, middle, pages)
            try:
                first = load(0, middle)
            finally:
                wait([second])  # until then it writes blocks
        finally:
            self._helper_free.release()
        return first.then(second.result(), middle)

    def _schedule(self, order: LoadOrder, run: PageRun) -> tuple[Schedule, float]:
        """By when pages of a run are due, and the whole load. Where a part is of no use, there is
        one bound for all."""
        most_s = self._settings.load_timeout_s
        if not order.page_compute_s:
            return Schedule(0.0, most_s), most_s
        if not self._whole:
            return Schedule.of(len(run.blocks), order.page_compute_s), most_s
        computing_s = order.page_compute_s * len(order.runs[0].blocks)
        most_s = min(most_s, _WHOLE_SHARE * computing_s)
        return Schedule(0.0, most_s), most_s

    def _report(self, order: LoadOrder, results: list[LoadResult]) -> None:
        bad: list[int] = []
        loaded = 0
        loaded_bytes = 0
        for place, run in enumerate(order.runs):
            pages = results[place].pages if place < len(results) else 0
            bad += run.blocks[pages:]
            loaded += pages
            loaded_bytes += pages * self._memories[run.group].block_bytes
            self._clear(run, pages)
        with self._lock:
            self._done.received.add(order.request_id)
            if bad or order.refused:
                self._done.outcomes.failed.add(order.request_id)
                if self._whole or order.refused:
                    self._done.failed.add(order.request_id)
                else:
                    self._done.bad_blocks.update(bad)
            for name, amount in (
                ("loaded_blocks", loaded),
                ("missed_blocks", len(bad)),
                ("loaded_bytes", loaded_bytes),
            ):
                self._stats.add(name, amount)
            seconds = sum(result.seconds for result in results)
            if order.from_nvme and (loaded_bytes >= _TELLING_BYTES or bad) and seconds > 0:
                # What was given up says most: how slow it is.
                self._done.outcomes.nvme_bytes_per_s = max(loaded_bytes, 1) / seconds
            elif loaded_bytes >= _TELLING_BYTES and seconds > 0:
                self._done.outcomes.load_bytes_per_s = loaded_bytes / seconds

    def _clear(self, run: PageRun, pages: int) -> None:
        """Zeroes the blocks that did not come: a load may have left bytes in them that failed their
        check, which can be NaN, and attention reads a block's unused end."""
        blocks = run.blocks[pages:]
        memory = self._memories[run.group]
        zeros = np.zeros((1, memory.block_bytes), np.uint8)
        try:
            for block in blocks:
                memory.scatter([block], zeros)
        except Exception:  # noqa: BLE001 - a thread's edge: the report must be made
            _log.exception("kvwarehouse: blocks of a failed load could not be cleared")

    # -- in the storing thread -----------------------------------------------------------------

    def _stored(self, runs: list[PageRun], result: kvw.StoreResult) -> None:
        page_bytes = self._memories[runs[0].group].block_bytes
        self._stats_add(
            stored_blocks=result.stored,
            stored_bytes=result.stored * page_bytes,
            already_blocks=result.already,
            dropped_blocks=result.dropped_pages,
        )
        if self._wants_events and not result.dropped_pages:
            with self._lock:
                for run in runs:
                    self._done.outcomes.stored.update((run.group, key) for key in run.keys)

    def _stats_add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._stats.add(name, amount)


def _kv_dtype(vllm_config: Any, view: torch.Tensor) -> str:
    cached = str(vllm_config.cache_config.cache_dtype)
    return f"{str(view.dtype).removeprefix('torch.')}/{cached}"
