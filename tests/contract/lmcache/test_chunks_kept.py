"""Chunks come back byte for byte, to those whose KV is the same, and to nobody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvwarehouse_bench.harness.serving import Serving
from lmcache_model.objects import Memory, contents, filled, keys


def test_chunks_come_back_byte_for_byte_and_locks_are_given_back(
    start: Any, shared: Serving, seed: int
) -> None:
    server, named, source = start(shared.address), keys(seed), filled(seed)
    stored = server.store(named, source)
    assert stored.complete
    assert stored.size_bytes == 4 * source[0].get_size()
    assert not server.store(named, source).size_bytes, "it is there already"
    target = [Memory() for _ in named]
    assert server.lookup(named, target) == [True] * 4
    assert server.core.status()["locked_chunks"] == 4
    assert server.load(named, target) == [True] * 4
    assert contents(target) == contents(source)
    server.core.unlock(named)
    assert server.core.status()["locked_chunks"] == 0


def test_chunks_of_many_groups_and_layouts_in_one_task_are_told_apart(
    start: Any, shared: Serving, seed: int
) -> None:
    """A hybrid model: one task of LMCache's has chunks of several sizes."""
    server = start(shared.address)
    named = [*keys(seed, 3), *keys(seed, 3, object_group_id=1), *keys(seed, 3, object_group_id=2)]
    fields: list[dict[str, Any]] = [
        {},
        {"shapes": [(3, 5), (7, 11)], "dtypes": [np.dtype(np.float32), np.dtype(np.uint8)]},
        {"shapes": [(1, 16, 64)], "dtypes": [np.dtype(np.uint8)]},
    ]
    groups = [filled(seed + number, 3, **one) for number, one in enumerate(fields)]
    mixed = [place for number in range(3) for place in (number, number + 3, number + 6)]
    source = [one for group in groups for one in group]
    assert server.store([named[i] for i in mixed], [source[i] for i in mixed]).complete
    target = [Memory(one.shapes, one.dtypes) for one in source]
    assert server.prefetch(named, target) == [True] * 9
    assert contents(target) == contents(source)


def test_gaps_are_misses_and_what_is_behind_them_comes(
    start: Any, shared: Serving, seed: int
) -> None:
    """Sliding windows and states want chunks behind a gap."""
    server, named, source = start(shared.address), keys(seed, 9), filled(seed, 9)
    there = [1, 2, 5, 7]
    assert server.store([named[i] for i in there], [source[i] for i in there]).complete
    target = [Memory() for _ in named]
    expected = [i in there for i in range(9)]
    assert server.lookup(named, target) == expected
    assert server.load(named, target) == expected
    assert [contents(target)[i] for i in there] == [contents(source)[i] for i in there]
    assert server.totals()["missed.missing"] == 5


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "other"},
        {"kv_rank": 0x02000200},
        {"kv_rank": 0x02010201},
        {"object_group_id": 1},
        {"cache_salt": "somebody"},
    ],
)
def test_keys_of_others_never_meet(
    start: Any, shared: Serving, seed: int, other: dict[str, Any]
) -> None:
    server, source = start(shared.address), filled(seed)
    assert server.store(keys(seed), source).complete
    assert server.prefetch(keys(seed), [Memory() for _ in source]) == [True] * 4
    assert server.prefetch(keys(seed, **other), [Memory() for _ in source]) == [False] * 4
    target = [Memory() for _ in source]
    assert server.load(keys(seed, **other), target) == [False] * 4
    assert not any(one.bytes.any() for one in target)
    others = filled(seed + 1)
    assert server.store(keys(seed, **other), others).size_bytes, "stored by itself"
    assert server.prefetch(keys(seed), target) == [True] * 4
    assert contents(target) == contents(source)


@pytest.mark.parametrize(
    "fields",
    [
        {"shapes": [(2, 4, 64, 16)]},
        {"dtypes": [np.dtype(np.int16)]},
        {"shapes": [(2, 4, 8, 64)]},
        {"shapes": [(1, 4, 16, 64)] * 2, "dtypes": [np.dtype(np.float16)] * 2},
    ],
)
def test_chunks_of_other_layouts_never_meet(
    start: Any, shared: Serving, seed: int, fields: dict[str, Any]
) -> None:
    """Types and shapes of the same size, too; the last: two tensors of half of it."""
    server, named = start(shared.address), keys(seed)
    assert server.store(named, filled(seed)).complete
    target = [Memory(**fields) for _ in named]
    assert server.prefetch(named, target) == [False] * 4
    assert server.load(named, target) == [False] * 4


@pytest.mark.parametrize(
    "settings", [{"weights": "others"}, {"salt": "others"}, {"version": "0.5.7"}]
)
def test_servers_of_other_weights_salt_or_version_never_meet(
    start: Any, shared: Serving, seed: int, settings: dict[str, str]
) -> None:
    server, named = start(shared.address), keys(seed)
    assert server.store(named, filled(seed)).complete
    assert start(shared.address).lookup(named) == [True] * 4
    assert start(shared.address, **settings).lookup(named) == [False] * 4


def test_weights_are_told_by_their_files_for_each_model(
    start: Any, shared: Serving, seed: int, tmp_path: Any
) -> None:
    for name, text in (("a", "one"), ("b", "other"), ("c", "one")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(text.encode() * 99)
    checkpoints = {"tiny": str(tmp_path / "a")}
    server = start(shared.address, weights={}, checkpoints=checkpoints)
    named, source = keys(seed), filled(seed)
    assert server.store(named, source).complete
    unnamed = server.store(keys(seed, model_name="unnamed"), source)
    assert not unnamed.complete
    assert server.totals()["dropped.not_served"] == 4
    for folder, found in (("b", False), ("c", True)):
        other = start(shared.address, weights={}, checkpoints={"tiny": str(tmp_path / folder)})
        assert other.lookup(named) == [found] * 4


def test_users_by_the_thousand_need_no_namespace_each(
    start: Any, shared: Serving, seed: int
) -> None:
    """A daemon keeps 4,096 namespaces."""
    server = start(shared.address)
    with shared.connect() as client:
        before = len(client.namespaces())
        for user in range(40):
            assert server.store(keys(seed, 1, cache_salt=f"user-{user}"), filled(user, 1)).complete
        assert len(client.namespaces()) == before + 1
    target = [Memory()]
    assert server.prefetch(keys(seed, 1, cache_salt="user-7"), target) == [True]
    assert contents(target) == contents(filled(7, 1))


def test_packed_chunks_and_short_hashes_are_not_kept(
    start: Any, shared: Serving, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A serde's chunk has fewer bytes than its layout; Python's own hash has 8."""
    server = start(shared.address)
    assert not server.store(keys(seed), filled(seed, used_bytes=100)).complete
    assert "serde" in caplog.text
    short = [type(key)(key.chunk_hash[:8]) for key in keys(seed)]
    assert not server.store(short, filled(seed)).complete
    assert server.lookup(short) == [False] * 4
    assert caplog.text.count("--hash-algorithm blake3") == 1


def test_modes_store_nothing_or_load_nothing(start: Any, shared: Serving, seed: int) -> None:
    named, source = keys(seed), filled(seed)
    reader = start(shared.address, mode="read_only")
    assert not reader.store(named, source).complete
    assert reader.totals()["dropped.read_only"] == 4
    writer = start(shared.address, mode="write_only")
    assert writer.store(named, source).complete
    assert writer.lookup(named) == [False] * 4
    assert writer.load(named, [Memory() for _ in named]) == [False] * 4
    target = [Memory() for _ in named]
    assert reader.prefetch(named, target) == [True] * 4
    assert contents(target) == contents(source)
