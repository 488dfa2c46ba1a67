"""vLLM's own tiering manager with the tier beneath it, over a real daemon: without vLLM's workers
and scheduler. Who uses it plays those."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_connectors.vllm.weights_watch import WeightsNews
from kvwarehouse_connectors.vllm_tier.handover import EngineLink, handed_over
from kvwarehouse_connectors.vllm_tier.rank_rows import GroupRows, RankRows
from kvwarehouse_connectors.vllm_tier.steps import StepVerdict
from vllm_parts.halves import engine_config
from vllm_parts.requests import request

BLOCK_BYTES = 8192
STEP = ScheduleEndContext((), ())
NARROW = ((0, 4096),)
"""Of the second group, which has half as many layers."""
ROWS = RankRows(
    0,
    "cpu",
    "LBHNC",
    (
        GroupRows(((0, BLOCK_BYTES),), "wide", "CPU_ATTN", "float16/auto"),
        GroupRows(NARROW, "narrow", "CPU_ATTN", "float16/auto"),
    ),
)


def model(**fields: Any) -> Any:
    engine = engine_config(["a", "b", "c"], **fields)
    engine.load_config.download_dir = None
    return engine


def offloading(tier: dict[str, Any] | None = None, **parallel: Any) -> OffloadingConfig:
    """Two groups, 16 chunks. tier: its entry in secondary_tiers."""
    ranks = {"world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, **parallel}
    return OffloadingConfig(
        groups=(
            OffloadingGroupConfig(tokens_per_block=16, layer_names=("a", "b"), group_id=0),
            OffloadingGroupConfig(tokens_per_block=16, layer_names=("c",), group_id=1),
        ),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=False,
        extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 16 * BLOCK_BYTES,
            "secondary_tiers": [tier] if tier else [],
        },
        engine_id=f"kvw-test-{uuid.uuid4()}",
        model=OffloadingModelConfig(name="folder/tiny", dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=ranks.pop("is_parallelism_agnostic", False),
            **ranks,
        ),
        kv_cache_layout="LBHNC",
    )


def entry(address: str, **settings: Any) -> dict[str, Any]:
    bounds = {"load_timeout_s": DEADLINE_S, "store_timeout_s": DEADLINE_S}
    given = {"address": address, "weights": "w", **bounds, **settings}
    return {
        "type": "WarehouseTier",
        "module_path": "kvwarehouse_connectors.vllm_tier",
        **{f"kvwarehouse.{name}": value for name, value in given.items()},
    }


class Manager:
    """vLLM's, with the tier beneath it. settings: the tier's, without their prefix."""

    def __init__(self, address: str, **settings: Any) -> None:
        self.link = EngineLink(model())
        spec = OffloadingSpecFactory.create_spec(offloading(entry(address, **settings)))
        with handed_over(self.link):
            self.vllm: Any = spec.get_manager()
        for tier in self.link.tiers:
            tier.rows_known([ROWS])
        (self.tier,) = self.vllm.secondary_tiers

    def connected(self) -> Manager:
        """Waits until the daemon knows the namespaces."""
        core = self.tier._core
        found = core._connection.namespace
        eventually(lambda: all(found(g.space) for g in core._groups.values()), "the namespaces")
        return self

    @property
    def rows(self) -> Any:
        """A view for a moment: vLLM's shutdown wants none left."""
        return np.frombuffer(self.vllm.primary_tier.get_kv_memoryview(), np.uint8).reshape(16, -1)

    def begin(self, name: str, **options: Any) -> ReqContext:
        self.link.begin(request([1] * 16, name=name, **options))
        context = ReqContext(name)
        self.vllm.on_new_request(context)
        return context

    def store(self, context: ReqContext, named: list[bytes], seed: int) -> list[bytes]:
        """As after a copy from the GPU. Returns the bytes, once the tier has them."""
        prepared = self.vllm.prepare_store(named, context)
        rng = np.random.default_rng(seed)
        for row in prepared.store_spec.chunk_ids:
            self.rows[row] = rng.integers(0, 256, BLOCK_BYTES, np.uint8)
        written = [self.rows[row].tobytes() for row in prepared.store_spec.chunk_ids]
        self.vllm.complete_store(set(named), context)
        self.settle()
        return written

    def step(self) -> None:
        """Of an engine whose weights are as they were."""
        self.link.step_begins()
        self.vllm.on_schedule_end(STEP)
        self.link.take(StepVerdict(None, self.link.step, WeightsNews()))

    def reset(self) -> None:
        """As the scheduler does it. vLLM 0.33 loads nothing until the workers are done."""
        self.vllm.reset_cache()
        getattr(self.vllm, "on_reset_flushed", lambda: None)()

    def settle(self) -> None:
        def idle() -> bool:
            self.step()
            return not self.vllm._jobs

        eventually(idle, "a manager without jobs")

    def found(self, context: ReqContext, named: list[bytes]) -> list[LookupResult]:
        """As the scheduler asks: again in each step, until nothing is pending."""

        def known() -> list[LookupResult] | None:
            answers = [self.vllm.lookup(one, context) for one in named]
            self.step()
            waits = {LookupResult.RETRY, LookupResult.HIT_PENDING}
            return None if waits & set(answers) else answers

        answers: list[LookupResult] = eventually(known, "an end of asking again")
        return answers

    def contents(self, context: ReqContext, named: list[bytes]) -> list[bytes]:
        loaded = self.vllm.prepare_load(named, context)
        found = [self.rows[row].tobytes() for row in loaded.chunk_ids]
        self.vllm.complete_load(named, context)
        return found

    def forget(self) -> None:
        """The CPU tier alone, as if others had needed its rows."""
        self.vllm.primary_tier.reset_cache()
