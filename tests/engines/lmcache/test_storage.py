"""LMCache's storage manager stores to the warehouse and prefetches from it; whatever becomes of the
daemon or of a chunk, what its L1 takes is what was stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from lmcache_rig.storage import LAYOUT, Storage, keys, ranks
from testkit.damage import find, find_one

ROUNDS = 9


def test_chunks_come_back_byte_for_byte_after_the_l1_lost_them(
    start: Any, shared: Serving, seed: int
) -> None:
    storage, named = start(shared.address), keys(seed)
    chunks = storage.store(named, seed)
    assert storage.prefetch(named).l2 == 0, "the L1 has them still"
    storage.forget()
    back = storage.prefetch(named)
    assert back.l2 == 5
    assert back.chunks == chunks
    assert storage.status()["locked_chunks"] == 0


def test_all_ranks_of_a_request_are_looked_up_and_loaded_together(
    start: Any, shared: Serving, seed: int
) -> None:
    """A prefix counts as far as every rank has it."""
    storage = start(shared.address)
    rows = [keys(seed, 4, kv_rank=rank) for rank in ranks(2)]
    chunks = storage.store(rows[0], seed) + storage.store(rows[1][:3], seed + 1)
    storage.forget()
    back = storage.prefetch(*rows)
    assert back.l2 == 6
    assert back.chunks == chunks[:3] + chunks[4:]
    assert storage.status()["locked_chunks"] == 0, "also those that were found and not wanted"


def test_chunks_of_several_tensors_and_types_come_back(
    start: Any, shared: Serving, seed: int
) -> None:
    layout = MemoryLayoutDesc(
        [torch.Size([2, 3, 8, 32]), torch.Size([1, 7, 13])], [torch.float16, torch.uint8]
    )
    storage, named = start(shared.address), keys(seed)
    chunks = storage.store(named, seed, layout)
    storage.forget()
    assert storage.prefetch(named).l2 == 0, "of another layout"
    assert storage.prefetch(named, layout=layout).chunks == chunks


@pytest.mark.parametrize(
    "other", [{"model_name": "org/other"}, {"kv_rank": ranks(2)[0]}, {"cache_salt": "somebody"}]
)
def test_other_models_ranks_and_users_never_meet(
    start: Any, shared: Serving, seed: int, other: dict[str, Any]
) -> None:
    storage, named = start(shared.address), keys(seed)
    chunks = storage.store(named, seed)
    storage.forget()
    assert storage.prefetch(keys(seed, **other)).l2 == 0
    others = storage.store(keys(seed, **other), seed + 1)
    storage.forget()
    assert storage.prefetch(keys(seed, **other)).chunks == others
    assert storage.prefetch(named).chunks == chunks
    assert start(shared.address, weights="retrained").prefetch(named).l2 == 0
    assert start(shared.address).prefetch(named).chunks == chunks


def test_a_chunk_damaged_in_dram_and_on_nvme_ends_the_prefix_before_it(
    start: Any, serving: Serving, seed: int
) -> None:
    storage, named = start(serving.address), keys(seed)
    chunks = storage.store(named, seed)
    storage.forget()
    with serving.connect() as client:
        assert client.flush().pending == 0
    third = np.frombuffer(chunks[2], np.uint8)
    find_one([serving.arena_dir / "arena"], third).flip(5, at=1000)
    eventually(lambda: storage.prefetch(named).chunks == chunks, "the good copy on NVMe")
    for place in find(serving.segments, third):
        place.flip(1, at=77)
    with serving.connect() as client:
        client.evict(None, 1000)
    storage.forget()
    assert storage.prefetch(named).chunks == chunks[:2]
    assert storage.status()["locked_chunks"] == 0


@pytest.mark.usefixtures("end_is_seen")
def test_a_daemon_killed_again_and_again_costs_misses_alone(
    start: Any, serving: Serving, seed: int
) -> None:
    storage = start(serving.address)
    kept: dict[int, list[bytes]] = {}
    ended = 0
    for turn in range(ROUNDS):
        if turn % 3 == 1:
            ended = storage.incarnation()
            serving.kill()
        before = storage.totals().get("stored_chunks", 0)
        chunks = storage.store(keys(seed + 100 * turn), seed + turn)
        if storage.totals().get("stored_chunks", 0) == before + 5:
            kept[turn] = chunks
        storage.forget()
        for other, expected in kept.items():
            back = storage.prefetch(keys(seed + 100 * other))
            assert back.chunks == expected[: len(back.chunks)]
        if turn % 3 == 2:
            serving.start()
            # The one that was killed may seem healthy still.
            eventually(
                lambda e=ended: storage.incarnation() != e and storage.status()["is_healthy"],
                "that the daemon is seen",
            )
    assert len(kept) >= ROUNDS // 3
    for turn, expected in kept.items():
        named = keys(seed + 100 * turn)
        eventually(
            lambda n=named, e=expected: storage.prefetch(n).chunks == e, "all that was stored"
        )
    assert storage.status()["locked_chunks"] == 0


@pytest.mark.usefixtures("end_is_seen")
def test_a_stopped_daemon_is_not_waited_for(start: Any, serving: Serving, seed: int) -> None:
    # Bounds as far off as they may be: who waits for them fails.
    storage = start(serving.address, load_timeout_s=120, store_timeout_s=120)
    far, near = keys(seed), keys(seed + 100)
    storage.store(far, seed)
    with serving.connect() as client:
        assert client.flush().pending == 0
        client.evict(None, 1000)
    chunks = storage.store(near, seed + 1)
    storage.forget()
    serving.pause()
    try:
        eventually(lambda: storage.prefetch(far).l2 == 0, "that it is known to stand still")
        assert storage.prefetch(near).chunks == chunks
        storage.store(keys(seed + 200), seed + 2)
        assert storage.totals()["dropped.unreachable"] == 5
    finally:
        serving.resume()
    eventually(lambda: storage.prefetch(far).l2 == 5, "chunks from NVMe")


def test_a_full_warehouse_makes_room_and_lmcache_goes_on(
    start: Any, tmp_path: Path, seed: int
) -> None:
    layout = MemoryLayoutDesc([torch.Size([2, 4, 256, 128])], [torch.bfloat16])  # 512 KiB
    with Serving(tmp_path, dram="16MiB") as serving:
        storage: Storage = start(serving.address)
        for turn in range(16):
            chunks = storage.store(keys(seed + 100 * turn, 4), seed + turn, layout)
            storage.forget()
        assert storage.totals()["stored_chunks"] == 64
        assert storage.prefetch(keys(seed + 1500, 4), layout=layout).chunks == chunks
        assert storage.prefetch(keys(seed, 4), layout=layout).l2 == 0


@pytest.mark.usefixtures("end_is_seen")
def test_a_policy_that_empties_the_l1_keeps_what_the_warehouse_did_not_take(
    start: Any, serving: Serving, seed: int
) -> None:
    """LMCache's skip_l1 deletes from its L1 what its L2 says it has."""
    storage = start(serving.address, options=("--l2-store-policy", "skip_l1"))
    chunks = storage.store(keys(seed), seed)
    assert storage.prefetch(keys(seed)).l2 == 5
    serving.kill()
    eventually(lambda: not storage.status()["is_healthy"], "that the daemon is gone")
    kept = storage.store(keys(seed + 100), seed + 1)
    back = storage.prefetch(keys(seed + 100))
    assert (back.l2, back.chunks) == (0, kept)
    serving.start()
    eventually(lambda: storage.prefetch(keys(seed)).chunks == chunks, "from the next daemon")


def test_lmcache_adds_and_removes_the_warehouse_at_run_time(
    start: Any, shared: Serving, seed: int
) -> None:
    storage = start(shared.address)
    chunks = storage.store(keys(seed), seed)
    (descriptor, _) = storage.manager.l2_adapters()[0]
    storage.manager.delete_l2_adapter(descriptor.index)
    storage.forget()
    assert storage.prefetch(keys(seed)).l2 == 0
    storage.manager.add_l2_adapter(descriptor.config)
    eventually(lambda: storage.prefetch(keys(seed)).chunks == chunks, "from the new one")


def test_bad_settings_refuse_lmcaches_start_by_name(start: Any, shared: Serving) -> None:
    with pytest.raises(kvw.UsageError, match=r"kvwarehouse\.trust_model_names"):
        start(shared.address, weights="")
    with pytest.raises(kvw.UsageError, match=r"kvwarehouse\.adress = .* is unknown"):
        start(shared.address, adress="unix:///x")


def test_a_deletion_of_single_chunks_is_refused_and_deletes_nothing(
    start: Any, shared: Serving, seed: int
) -> None:
    storage = start(shared.address)
    storage.store(keys(seed), seed)
    with pytest.raises(kvw.UsageError, match="kvwarehouse clear"):
        storage.adapter.delete(keys(seed))
    storage.forget()
    assert storage.prefetch(keys(seed), layout=LAYOUT).l2 == 5
