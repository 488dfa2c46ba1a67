"""Both halves of the connector, joined as vLLM joins them, over a real daemon: without an engine.

Who uses it plays the engine: it fills blocks, and says which tokens a step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from kvwarehouse_connectors.core.prefix_matcher import PrefixHit
from kvwarehouse_connectors.core.store_queue import StoreQueue
from kvwarehouse_connectors.vllm.messages import StepResults
from kvwarehouse_connectors.vllm.scheduler import SchedulerSide
from kvwarehouse_connectors.vllm.settings import read_settings
from kvwarehouse_connectors.vllm.worker import WorkerSide
from vllm_parts.steps import step
from vllm_parts.tensors import Bytes, Caches, caches

BLOCKS = 64


def engine_config(
    layers: Sequence[str], *, rank: int = 0, ranks: int = 1, stages: int = 1, **more: Any
) -> Any:
    """As much of a VllmConfig as the connector reads. ranks: of each pipeline stage. more: fields
    of model_config."""
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages,
            tensor_parallel_size=ranks,
            world_size=ranks * stages,
            rank=rank,
        ),
        model_config=SimpleNamespace(
            **{
                "is_encoder_decoder": False,
                "model": "folder/tiny",
                "hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": 8}),
                "dtype": torch.float16,
                "quantization": None,
                "max_model_len": 1024,
                "override_generation_config": {},
                **more,
            }
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo="sha256", kv_cache_layout="LBHNC", cache_dtype="auto"
        ),
        load_config=SimpleNamespace(load_format="auto"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=1024),
        kv_events_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(layers, layer)),
    )


class Stores:
    """What a worker gave its storing thread, and what that has told of: the last thing it does of a
    store, behind the daemon, which shows pages to everybody as soon as it has them."""

    def __init__(self, queue: StoreQueue) -> None:
        self._put, self._on_stored = queue.put, queue._on_stored
        self._given = self._told = 0
        queue.put, queue._on_stored = self._gives, self._tells  # type: ignore[method-assign]

    @property
    def over(self) -> bool:
        return self._told == self._given

    def _gives(self, *arguments: Any) -> bool:
        taken = self._put(*arguments)
        self._given += taken
        return taken

    def _tells(self, *arguments: Any) -> None:
        self._on_stored(*arguments)
        self._told += 1


@dataclass
class Engine:
    """One scheduler and its ranks. groups: as vLLM has them; each rank has caches of its own, and
    what `model` makes. later_stages: the groups of further pipeline stages, each with as many
    ranks."""

    address: str
    groups: Callable[[], list[KVCacheGroupSpec]]
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    role: str = "kv_both"
    model: Callable[[], torch.nn.Module] = lambda: torch.nn.Linear(64, 64)
    later_stages: Sequence[Callable[[], list[KVCacheGroupSpec]]] = ()

    def __enter__(self) -> Self:
        stages = (self.groups, *self.later_stages)
        layers = [name for groups in stages for group in groups() for name in group.layer_names]
        shape = {"ranks": self.ranks, "stages": len(stages)}
        # Neither a guess of the prefill rate nor how busy the machine is must decide what these
        # tests load and store.
        extra = {
            "address": self.address,
            "weights": "w",
            "load": "always",
            "load_timeout_s": DEADLINE_S,
            "store_timeout_s": DEADLINE_S,
            **self.settings,
        }
        chosen = read_settings(
            {f"kvwarehouse.{name}": value for name, value in extra.items()}, self.role
        )
        self.caches: list[Caches] = []
        self.workers: list[WorkerSide] = []
        self.stores: list[Stores] = []
        self.models: list[torch.nn.Module] = []
        for rank in range(len(stages) * self.ranks):
            cache = caches(stages[rank // self.ranks](), KVCacheLayout.LBHNC, BLOCKS)
            cache.config.hash_block_size = 16
            worker = WorkerSide(engine_config(layers, rank=rank, **shape), cache.config, chosen)
            self.models.append(self.model())
            worker.register(cache.by_layer, [self.models[-1]])
            assert worker._store_queue is not None
            self.stores.append(Stores(worker._store_queue))
            self.caches.append(cache)
            self.workers.append(worker)
        self.scheduler = SchedulerSide(
            engine_config(layers, **shape), self.caches[0].config, chosen
        )
        self.scheduler.set_cache_info(
            {divmod(rank, self.ranks): one.cache_info() for rank, one in enumerate(self.workers)}  # type: ignore[misc]
        )
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.bad_blocks: set[int] = set()
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    # -- an engine's doings ----------------------------------------------------------------------

    def step(self, running: dict[str, Any] | None = None, **scheduled: int) -> None:
        """One step. running: name to a request's tables, as `vllm_parts.steps` has them."""
        metadata = self.scheduler.step_metadata(step(scheduled, running or {}))
        ended = []
        for worker in self.workers:
            worker.start_loads(metadata)
            worker.take_copies(metadata)
            ended.append(worker.results())
            self.bad_blocks |= worker.bad_blocks()
        told: StepResults | None = None
        for worker in self.workers:
            results = worker.step_results()
            if results is not None:
                told = results if told is None else told.aggregate(results)
        received = [one for one, _ in ended]
        self._waiting = [
            before | now for before, now in zip(self._pending(), received, strict=True)
        ]
        everybody = set.intersection(*self._waiting)
        self._waiting = [one - everybody for one in self._waiting]
        self.received |= everybody
        self.failed |= set().union(*(failed for _, failed in ended))
        self.scheduler.take_results(told, everybody)
        self.scheduler.step_ends()

    def _pending(self) -> list[set[str]]:
        with suppress(AttributeError):
            return self._waiting
        self._waiting: list[set[str]] = [set() for _ in self.workers]
        return self._waiting

    def compute(self, request: Any, tables: list[list[int]], tokens: int) -> None:
        """A step that computes `tokens` more tokens of a request into the blocks of its tables,
        which hold what the caller put there."""
        name = request.request_id
        self.step({name: SimpleNamespace(tables=tables)}, **{name: tokens})
        request.num_computed_tokens += tokens

    def stored(self, request: Any, tokens: int) -> None:
        """Waits until a prompt's first tokens are there for the next one who asks, and the workers
        have done with storing them."""

        def found() -> bool:
            self.step()
            return self.promised(request) >= tokens

        eventually(found, f"{tokens} tokens are stored")
        self.settle()

    def settle(self) -> None:
        """Waits until whatever was given to be stored is stored, or is not, and was told of."""
        eventually(lambda: all(one.over for one in self.stores), "stores that are over")

    def promised(self, request: Any, local_tokens: int = 0) -> int:
        """What the scheduler would load for this request; it is forgotten again."""
        self.begin(request)
        tokens, _ = self.scheduler.matched(request, local_tokens)
        self.scheduler.finished(request)
        return int(tokens or 0)

    def begin(self, request: Any) -> None:
        """A request comes, and waits until its adapter is known, if it has one."""
        self.scheduler.on_new_request(request)

        def known() -> bool:
            self.scheduler.matched(request, 0)
            return request.request_id not in self.scheduler._looks

        if request.lora_request is not None:
            eventually(known, "the adapter is known")

    def load(self, request: Any, tables: list[list[int]], local_tokens: int = 0) -> int:
        """Matches, metadata and waits for a load; the tokens promised."""
        self.scheduler.on_new_request(request)
        tokens, is_async = self.scheduler.matched(request, local_tokens)
        assert tokens is not None
        if tokens:
            assert is_async
            self.scheduler.allocated(request, tables, tokens)
            self.ended(request)
        return tokens

    def ended(self, request: Any) -> None:
        def over() -> bool:
            self.step()
            return request.request_id in self.received

        eventually(over, "the load is reported")

    # -- blocks ------------------------------------------------------------------------------------

    def fill(self, blocks: Sequence[int], group: int = 0) -> list[list[Bytes]]:
        """Noise into blocks of every rank; what it was, rank by rank."""
        found = []
        for cache in self.caches:
            memory = cache.host(group)
            rows = torch.randint(0, 256, (len(blocks), memory.block_bytes), dtype=torch.uint8)
            memory.scatter(blocks, rows.numpy())
            found.append([cache.page(block, group) for block in blocks])
        return found

    def pages(self, blocks: Sequence[int], group: int = 0) -> list[list[Bytes]]:
        return [[cache.page(block, group) for block in blocks] for cache in self.caches]

    def hit(self, request: Any) -> PrefixHit | None:
        return self.scheduler._requests[request.request_id].hit


def same(one: list[list[Bytes]], other: list[list[Bytes]]) -> bool:
    return len(one) == len(other) and all(
        len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )
