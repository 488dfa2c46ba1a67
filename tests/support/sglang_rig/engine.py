"""One rank: SGLang's real HiCacheController with its threads, on real pools, and the connector
loaded by its real factory. The test says what the scheduler would.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
from sglang.srt import runtime_context
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_connectors.core import daemon_connection
from kvwarehouse_connectors.sglang import pools
from sglang_rig.pools import PAGE, Shape, content, device_pool, fill_pages, host_pool, wipe

THRESHOLD = PAGE
PATIENCE = (
    (pools, "_REGISTER_S"),
    (daemon_connection, "_CALL_TIMEOUT_S"),
    (daemon_connection, "_STALLED_S"),
)
"""Bounds of the connector's that a busy machine reaches, on which a daemon gets no turn for
seconds."""


@dataclass(frozen=True)
class Rank:
    """rendezvous: a file that the ranks share; with one rank, any."""

    rendezvous: Path
    tp_rank: int = 0
    tp_size: int = 1


@dataclass(frozen=True)
class Prefetched:
    """hit: tokens that all ranks could expect. pages: the bytes of those that came."""

    hit: int
    tokens: int
    pages: list[bytes] = field(repr=False)


class _Device:
    """In the place of the allocator of the device pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def get_kvcache(self) -> Any:
        return self._pool


def join_ranks(rank: Rank) -> None:
    """Once a process: SGLang's view of its ranks is global."""
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rank.rendezvous}",
            rank=rank.tp_rank,
            world_size=rank.tp_size,
        )
    runtime_context.get_parallel().override_permanently(
        tp_rank=rank.tp_rank,
        tp_size=rank.tp_size,
        pp_rank=0,
        pp_size=1,
        attn_tp_rank=rank.tp_rank,
        attn_tp_size=rank.tp_size,
        attn_dp_rank=0,
        attn_cp_rank=0,
        attn_dcp_size=1,
        attn_dcp_rank=0,
        attn_dp_enabled=False,
    )


def config(address: str, **more: Any) -> dict[str, Any]:
    """As --hicache-storage-backend-extra-config has it, without what SGLang takes out of it."""
    return {
        "backend_name": "kvwarehouse",
        "module_path": "kvwarehouse_connectors.sglang",
        "class_name": "WarehouseStorage",
        "interface_v1": 1,
        "kvwarehouse.address": address,
        "kvwarehouse.weights": "noise",
        # Bounds that no healthy machine reaches.
        "kvwarehouse.load_timeout_s": DEADLINE_S,
        "kvwarehouse.store_timeout_s": DEADLINE_S,
        **more,
    }


class Engine:
    """extra: as `config` makes it. Attached when entered. join_ranks comes first.

    passes_prefix_keys: SGLang's hicache_storage_pass_prefix_keys, which its tree takes out of the
    extra config."""

    passes_prefix_keys = False

    def __init__(self, shape: Shape, extra: dict[str, Any], model: str = "tiny") -> None:
        self._extra, self._model = extra, model
        self.device = device_pool(shape)
        self.host = host_pool(shape, self.device)
        self.controller = HiCacheController(
            _Device(self.device),
            self.host,
            PAGE,
            dist.group.WORLD,
            threading.Event(),
            write_policy="write_through",
            io_backend="direct",
        )
        self._requests = 0

    @property
    def storage(self) -> Any:
        """The backend, beneath SGLang's injector of failures where that is on."""
        found = self.controller.storage_backend
        return getattr(found, "_backend", found)

    def incarnation(self) -> int:
        """Of the daemon that the connector has found last."""
        return int(self.storage._connection.client.control().incarnation)

    def attach(self) -> None:
        self.controller.attach_storage_backend(
            "dynamic",
            prefetch_threshold=THRESHOLD,
            model_name=self._model,
            storage_backend_extra_config=dict(self._extra),
        )

    def store(
        self,
        tokens: list[int],
        seed: int,
        ahead: Sequence[list[int]] = (),
        salt: str | None = None,
    ) -> tuple[int, list[bytes]]:
        """As if these tokens had been computed, and copied to the host pool: fills pages with noise
        and backs them up. ahead: the nodes of SGLang's tree before them. salt: the request's.
        Returns the tokens that SGLang counts as stored, and the pages' bytes."""
        node = _node([*ahead, tokens], salt)
        slots = self.host.alloc(len(tokens) // PAGE * PAGE)
        assert slots is not None
        fill_pages(self.host, slots, seed)
        pages = content(self.host, slots)
        self.controller.write_storage(
            slots,
            tokens,
            hash_value=node.hash_value,
            prefix_keys=self._prefix_keys(node),
        )
        done = self.controller.ack_backup_queue.get(timeout=DEADLINE_S)
        self.host.free(slots)
        wipe(self.host)
        return done.completed_tokens, pages

    def prefetch(
        self, tokens: list[int], ahead: Sequence[list[int]] = (), salt: str | None = None
    ) -> Prefetched:
        """As if a request with these tokens waited, and the nodes `ahead` of SGLang's tree had what
        is before them: what came into pages of the host pool. They are given back, and wiped."""
        self._requests += 1
        last_host_node = _node(ahead, salt)
        self.controller.prefetch(
            f"request-{self._requests}",
            _key(tokens, salt),
            last_host_node.get_last_hash_value(),
            self._prefix_keys(last_host_node),
        )
        operation = self.controller.prefetch_hit_queue.get(timeout=DEADLINE_S)
        hit = operation.storage_hit_count
        if not hit:
            return Prefetched(0, 0, [])
        slots = self.controller.alloc_prefetch_host_buffers(operation, hit)
        operation.host_indices = slots
        self.controller.prefetch_buffer.put(operation)
        loaded = self._loaded()
        pages = content(self.host, slots[:loaded]) if loaded else []
        self.host.free(slots)
        wipe(self.host)
        return Prefetched(hit, loaded, pages)

    def _prefix_keys(self, node: Any) -> list[str] | None:
        """As SGLang's tree passes them with a backup of this node, and its scheduler with a
        prefetch behind it."""
        if not self.passes_prefix_keys:
            return None
        tree = SimpleNamespace(node_by_id=lambda _: node)
        return list(UnifiedTreeCore.get_prefix_hash_values(tree, node.id))

    def _loaded(self) -> int:
        """Tokens of one prefetch, by its acknowledgements."""
        loaded = 0
        while True:
            try:
                ack = self.controller.ack_prefetch_queue.get(timeout=DEADLINE_S)
            except Empty:
                raise AssertionError("a prefetch was never acknowledged") from None
            if ack.completed_tokens is not None:
                loaded = ack.completed_tokens
            if ack.completed_req:
                return int(loaded)

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *error: object) -> None:
        self.controller.detach_storage_backend()


def _key(tokens: list[int], salt: str | None) -> Any:
    """As SGLang's radix tree has it."""
    return RadixKey(array("q", tokens), cache_salt=salt)


def _node(path: Sequence[list[int]], salt: str | None) -> Any:
    """The last of SGLang's tree on this path, each with the keys of its own pages; without any, the
    root."""
    node = UnifiedTreeNode(())
    node.hash_value = []
    for tokens in path:
        parent, node = node, UnifiedTreeNode(())
        node.parent = parent
        node.hash_value = get_storage_hash_str(
            _key(tokens, salt), parent.get_last_hash_value(), page_size=PAGE
        )
    return node


def prompt(seed: int, pages: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed % (1 << 62))
    return torch.randint(0, 32_000, (pages * PAGE,), generator=generator).tolist()
