"""LMCache's storage manager in this process, as its server makes it from its command line: L1, the
two controllers with their threads, and the connector loaded by the plugin's factory. The test says
what engines would."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager

from kvwarehouse_bench.harness.eventually import DEADLINE_S, eventually
from lmcache_rig.spec import l2_adapter

LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 16, 64])], [torch.bfloat16])


def ranks(world_size: int) -> list[int]:
    return [
        ObjectKey.ComputeKVRank(world_size, rank, world_size, rank) for rank in range(world_size)
    ]


def keys(seed: int, count: int = 5, **fields: Any) -> list[ObjectKey]:
    fields = {"model_name": "org/tiny", "kv_rank": ranks(1)[0], **fields}
    return [
        ObjectKey(((seed + number) % 2**256).to_bytes(32, "big"), **fields)
        for number in range(count)
    ]


@dataclass(frozen=True)
class Prefetched:
    """l2: chunks that came from the L2. chunks: the bytes of all that the request got, in order."""

    l2: int
    chunks: list[bytes] = field(repr=False)


class Storage:
    """layout: of the one object group, unless a call says otherwise."""

    def __init__(self, address: str, *, options: Sequence[str] = (), **settings: Any) -> None:
        parser = add_storage_manager_args(argparse.ArgumentParser())
        arguments = [
            "--l1-size-gb",
            "0.25",
            "--no-l1-use-lazy",
            "--eviction-policy",
            "LRU",
            *options,
        ]
        arguments += ["--l2-adapter", l2_adapter(address, **settings)]
        config = parse_args_to_config(parser.parse_args(arguments))
        for one in config.l1_manager_configs:
            one.memory_config.shm_name = ""  # it would have the same for all of a process
        self.manager = StorageManager(config)

    @property
    def adapter(self) -> Any:
        return self.manager.l2_adapters()[0][1]

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.adapter.report_status()
        return status

    def incarnation(self) -> int:
        """Of the daemon that the connector has found last."""
        client = self.adapter._core._connection.client
        return int(client.control().incarnation)

    def totals(self) -> dict[str, int]:
        totals: dict[str, int] = self.status()["totals"]
        return totals

    def write(self, named: list[Any], seed: int, layout: Any = LAYOUT) -> list[bytes]:
        """What an engine does with computed KV; returns at once, with the bytes."""
        reserved = self.manager.reserve_write(named, layout)
        generator = torch.Generator().manual_seed(seed % 2**63)
        chunks = []
        for key in named:
            size = reserved[key].get_size()
            noise = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
            reserved[key].raw_tensor[:size].copy_(noise)
            chunks.append(noise.numpy().tobytes())
        self.manager.finish_write(named)
        return chunks

    def store(self, named: list[Any], seed: int, layout: Any = LAYOUT) -> list[bytes]:
        """The same, and waits until LMCache has its answer about the L2."""
        before = self.answered()
        chunks = self.write(named, seed, layout)
        eventually(lambda: self.answered() >= before + len(named), "the store's answer")
        eventually(lambda: self.in_flight() == 0, "that LMCache has taken it")
        return chunks

    def answered(self) -> int:
        totals = self.totals()
        return sum(totals.get(f"{name}_chunks", 0) for name in ("stored", "already", "dropped"))

    def in_flight(self) -> int:
        count: int = self.manager.report_status()["store_controller"]["in_flight_task_count"]
        return count

    def forget(self) -> None:
        """Empties the L1."""
        self.manager.clear(force=True)

    def prefetch(self, *rows: list[Any], layout: Any = LAYOUT) -> Prefetched:
        """One row a rank or group, as one request; with an empty L1 all comes from the L2."""
        groups = [GroupedObjectKeys(row, row[0].object_group_id, layout) for row in rows]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(groups))
        assert self.manager.wait_prefetch_status(handle, DEADLINE_S)
        result = self.manager.query_prefetch_status(handle)
        assert result is not None
        hits = [
            key
            for row, cells in zip(rows, result.hit_cells, strict=True)
            for key in cells.gather(row)
        ]
        chunks: list[bytes] = []
        if hits:
            with self.manager.read_prefetched_results(hits) as objects:
                assert objects is not None
                chunks = [bytes(one.byte_array) for one in objects]
            self.manager.finish_read_prefetched(hits)
        return Prefetched(result.l2_hit_count, chunks)

    def close(self) -> None:
        self.manager.close()
