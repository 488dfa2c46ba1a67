"""The tier under vLLM's own tiering manager, over a real daemon, with the test in the place of
vLLM's workers and scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from safetensors.numpy import save_file
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import RSWASpec
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingModelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import TransferJob

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.vllm import adapters, compat, loaded_files
from kvwarehouse_connectors.vllm_tier import WarehouseOffloadingConnector, WarehouseTier, identity
from kvwarehouse_connectors.vllm_tier.chunks import group_of
from kvwarehouse_connectors.vllm_tier.handover import EngineLink, handed_over
from kvwarehouse_connectors.vllm_tier.metrics import COUNTERS
from kvwarehouse_connectors.vllm_tier.rank_rows import (
    RankRows,
    extents,
    joined,
    rank_rows,
)
from kvwarehouse_connectors.vllm_tier.settings import read_settings
from kvwarehouse_connectors.vllm_tier.tier_core import RequestFacts
from vllm_parts.requests import adapter, request, tokens, write_adapter
from vllm_parts.specs import config as cache_config
from vllm_parts.specs import full, window
from vllm_parts.tiering import BLOCK_BYTES, NARROW, ROWS, STEP, Manager, entry, model, offloading
from vllm_tier_model.primary import key, keys


@pytest.fixture
def manager(shared: Serving, request: pytest.FixtureRequest) -> Iterator[Manager]:
    made = Manager(shared.address, salt=request.node.nodeid[:200])
    yield made.connected()
    made.vllm.shutdown()


HIT, MISS = LookupResult.HIT, LookupResult.MISS


def test_chunks_come_back_through_vllms_own_manager(manager: Manager, seed: int) -> None:
    named = [*keys(seed), *keys(seed, count=2, group=1)]
    context = manager.begin("r")
    written = manager.store(context, named, seed)
    assert manager.found(context, named) == [HIT] * 6, "in the CPU tier"
    manager.forget()
    manager.rows[:] = 0
    again = manager.begin("again")
    assert manager.found(again, [*named, key(seed, "unknown")]) == [HIT] * 6 + [MISS]
    found = manager.contents(again, named)
    assert found[:4] == written[:4]
    size = NARROW[0][1]
    assert [page[:size] for page in found[4:]] == [page[:size] for page in written[4:]]
    assert [page[size:] for page in found[4:]] == [bytes(BLOCK_BYTES - size)] * 2, "foreign bytes"
    manager.vllm.on_request_finished(again)


def test_load_of_which_a_part_is_gone_is_told_key_by_key(
    manager: Manager, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the lookup and the load; vLLM frees the rows of those that did not come."""
    named = keys(seed)
    written = manager.store(manager.begin("r"), named, seed)
    manager.forget()
    context = manager.begin("again")
    load = manager.tier._core._pages._load

    def broken(space: Any, batch: Any, *more: Any) -> kvw.Loaded:
        if any(chunk.key == named[1] for chunk in batch.chunks[:1]):
            return kvw.Loaded(0, {"damaged": 1})
        loaded: kvw.Loaded = load(space, replace(batch, chunks=batch.chunks[:1]), *more)
        return loaded

    monkeypatch.setattr(manager.tier._core._pages, "_load", broken)
    monkeypatch.setattr(
        "kvwarehouse_connectors.vllm_tier.page_store._chunks_of_call", lambda chunk: 1
    )
    assert manager.found(context, named) == [HIT, MISS, HIT, HIT]
    chosen = [named[0], *named[2:]]
    assert manager.contents(context, chosen) == [written[0], *written[2:]]


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    found: float | None = registry.get_sample_value(
        f"kvwarehouse_tier_{name}_total", {"engine": "0", **labels}
    )
    return found


def test_counts_reach_vllms_metrics(
    manager: Manager, shared: Serving, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    kinds = {
        kind: lambda kind=kind, **options: kind(registry=registry, **options)
        for kind in (Gauge, Counter, Histogram)
    }
    extra = offloading(entry(shared.address)).extra_config
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    page = WarehouseOffloadingConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=transfer), kinds, ["engine"], {0: ["0"]}
    )
    for name in COUNTERS:
        if not name.startswith(("missed", "dropped")):
            assert sample(registry, name) is None, "nothing was counted yet"
    named = keys(seed)
    manager.store(manager.begin("r"), named, seed)
    manager.forget()
    context = manager.begin("again")
    assert manager.found(context, named) == [HIT] * 4
    manager.reset()
    other = [key(seed, str(number)) for number in range(2)]
    monkeypatch.setattr(
        manager.tier._core._pages, "_store", lambda *asked: kvw.StoreResult(0, 0, {"no_room": 2})
    )
    manager.store(manager.begin("other"), other, seed)
    page.observe(manager.vllm.get_stats().data, 0)
    size = BLOCK_BYTES
    assert sample(registry, "stored_chunks") == sample(registry, "loaded_chunks") == 4
    assert sample(registry, "stored_bytes") == sample(registry, "loaded_bytes") == 4 * size
    assert sample(registry, "dropped_chunks", reason="no_room") == 2
    assert sample(registry, "new_epochs") == 1
    assert manager.tier.get_stats() is None, "nothing happened since"
    again = manager.tier.build_metric_definitions({})
    assert set(again) == {f"kvwarehouse_tier_{name}" for name in COUNTERS}


def test_reset_of_vllms_cache_ends_what_was_stored_before(manager: Manager, seed: int) -> None:
    named, context = keys(seed), manager.begin("r")
    manager.store(context, named, seed)
    manager.reset()
    assert manager.found(context, named) == [MISS] * 4
    after = manager.begin("after")
    assert manager.found(after, named) == [MISS] * 4
    written = manager.store(after, named, seed + 1)
    manager.forget()
    assert manager.found(after, named) == [HIT] * 4
    assert manager.contents(after, named) == written


def test_without_a_daemon_vllm_goes_on(tmp_path: Path, seed: int) -> None:
    manager = Manager(f"unix://{tmp_path}/nobody.sock")
    context = manager.begin("r")
    manager.store(context, keys(seed), seed)
    manager.forget()
    assert manager.found(context, keys(seed)) == [MISS] * 4
    manager.reset()
    manager.vllm.shutdown()
    manager.tier.shutdown()


def test_requests_of_another_tier_have_nothing_to_do_with_the_warehouse(
    manager: Manager, seed: int
) -> None:
    """Such as those that a peer-to-peer tier serves: nobody knows their adapters."""
    manager.store(manager.begin("r"), keys(seed), seed)
    manager.forget()
    stranger = ReqContext("stranger")
    manager.vllm.on_new_request(stranger)
    assert manager.found(stranger, keys(seed)) == [MISS] * 4


# -- hooks -----------------------------------------------------------------------------------------


def test_nothing_is_raised_into_vllm(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in any of these ends EngineCore."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("broken")

    context = manager.begin("r")
    for name in ("tier", "hold"):
        monkeypatch.setattr(manager.tier._core._pages, name, fail)
    monkeypatch.setattr(manager.tier._core, "begin", fail)
    assert manager.tier.lookup(key("x"), context) is MISS
    manager.tier.on_new_request(ReqContext("other"))
    job = TransferJob(7, [key("x")], np.array([1], np.int32), True, context)
    manager.tier.submit_load(job)
    manager.tier.submit_store(replace(job, job_id=8, keys={key("x", group=9)}))
    ended: dict[int, bool] = {}

    def reported() -> bool:
        ended.update({one.job_id: one.success for one in manager.tier.get_finished_jobs()})
        return len(ended) == 2

    eventually(reported, "both jobs are reported")
    assert ended == {7: False, 8: False}
    manager.tier.on_schedule_end(STEP)
    manager.tier.on_request_finished(ReqContext("never seen"))
    assert not manager.tier.has_pending_work()


def test_keys_are_taken_apart_as_vllm_does() -> None:
    for group in (0, 1, 7, 1 << 20):
        assert group_of(key("x", group=group)) == get_offload_group_idx(key("x", group=group))


# -- what is refused at the start ------------------------------------------------------------------


def test_vllms_own_connector_is_refused_in_words(shared: Serving) -> None:
    spec = OffloadingSpecFactory.create_spec(offloading(entry(shared.address)))
    with pytest.raises(kvw.UsageError, match="WarehouseOffloadingConnector") as refused:
        spec.get_manager()
    assert refused.value.code == "no_weights"


def test_weights_that_are_in_no_file_need_a_name(shared: Serving) -> None:
    engine = model()
    engine.load_config.load_format = "dummy"
    spec = OffloadingSpecFactory.create_spec(offloading(entry(shared.address, weights="")))
    with handed_over(EngineLink(engine)), pytest.raises(kvw.UsageError, match="dummy") as refused:
        spec.get_manager()
    assert refused.value.code == "no_weights"
    assert "secondary_tiers" in str(refused.value)


@pytest.mark.parametrize(
    "entries", [{"kvwarehouse.adress": "unix:///x"}, {"adress": "x"}, {"kvwarehouse.mode": "fast"}]
)
def test_settings_that_nobody_would_read_are_refused(entries: dict[str, Any]) -> None:
    with pytest.raises(kvw.UsageError, match="secondary_tiers") as refused:
        read_settings(entries)
    assert refused.value.code == "bad_setting"


def test_hashes_that_may_collide_are_refused() -> None:
    engine = model()
    engine.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(kvw.UsageError, match="sha256") as refused:
        WarehouseOffloadingConnector(engine, compat.KVConnectorRole.SCHEDULER, None)
    assert refused.value.code == "unsupported"


def test_tier_beside_others_is_refused(serving: Serving) -> None:
    config = offloading(entry(serving.address))
    config.extra_config["secondary_tiers"].append({"type": "fs", "root_dir": "folder"})
    spec = OffloadingSpecFactory.create_spec(config)
    with (
        handed_over(EngineLink(model())),
        pytest.raises(kvw.UsageError, match=r"beside fs: .* not which weights") as refused,
    ):
        spec.get_manager()
    assert refused.value.code == "unsupported"


def test_kind_whose_keys_do_not_say_its_bytes_is_refused() -> None:
    sizes = {"num_kv_heads": 1, "head_size": 8, "dtype": full(16).dtype}
    caches = cache_config(full(16), RSWASpec(block_size=16, rswa_window=64, **sizes))
    with pytest.raises(kvw.UsageError, match=r"RSWASpec.*ends with its prompt") as refused:
        WarehouseOffloadingConnector(model(), compat.KVConnectorRole.SCHEDULER, caches)
    assert refused.value.code == "unsupported"
    assert not compat.inexact_kind(cache_config(full(16), window(16, 64)))


def test_engine_of_which_a_rank_said_nothing_is_refused() -> None:
    with pytest.raises(kvw.UsageError, match="2 ranks") as refused:
        identity.row_groups(model(), offloading(world_size=2), [ROWS], "w", "")
    assert refused.value.code == "unsupported"


def test_tier_has_no_part_of_its_memory_left_over(manager: Manager) -> None:
    """vLLM's shutdown releases its view, which fails while there are others of it."""
    assert issubclass(type(manager.tier), WarehouseTier)
    view = manager.vllm.primary_tier.get_kv_memoryview()
    manager.vllm.shutdown()
    with pytest.raises(ValueError, match="released"):
        view.tobytes()


# -- requests --------------------------------------------------------------------------------------


def facts(**options: Any) -> RequestFacts:
    link = EngineLink(model())
    link.begin(request([1] * 16, **options))
    found, look = link.facts("r")
    assert look is None
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, RequestFacts()),
        ({"params": {"kvwarehouse.load": False}}, RequestFacts(loads=False)),
        ({"params": {"kvwarehouse.store": False}}, RequestFacts(stores=False)),
        ({"resumable": True}, RequestFacts(loads=False, stores=False)),
    ],
)
def test_request_is_served_as_it_says_and_as_its_keys_name_it(
    options: dict[str, Any], expected: RequestFacts
) -> None:
    assert facts(**options) == expected


@pytest.fixture
def start(shared: Serving, request: pytest.FixtureRequest) -> Iterator[Callable[[], Manager]]:
    """start(): a further engine with the same namespaces."""
    made: list[Manager] = []

    def started() -> Manager:
        made.append(Manager(shared.address, salt=request.node.nodeid[:200]).connected())
        return made[-1]

    yield started
    for manager in made:
        manager.vllm.shutdown()


def test_adapters_are_told_apart_by_their_weights(
    start: Callable[[], Manager], tmp_path: Path, seed: int
) -> None:
    """Also at the same path and under the same name."""
    lora, named = adapter(str(write_adapter(tmp_path / "one", 1.0))), keys(seed)
    first, second, third = start(), start(), start()
    context = first.begin("r", lora_request=lora)
    assert first.found(context, named) == [MISS] * 4
    first.store(context, named, seed)
    assert second.found(second.begin("r", lora_request=lora), named) == [HIT] * 4
    write_adapter(tmp_path / "one", 2.0)
    assert third.found(third.begin("r", lora_request=lora), named) == [MISS] * 4
    nowhere = third.begin("nowhere", lora_request=adapter("/nowhere", name="b", number=2))
    assert third.found(nowhere, named) == [MISS] * 4
    assert third.found(third.begin("none"), named) == [MISS] * 4


def trusted(manager: Manager, name: str) -> bool:
    """Whether the adapter of a request was known before a step."""
    look = manager.tier._with_adapters[name].look
    known = manager.link.adapters.fingerprint(look) is not None
    manager.step()
    return known


def test_nothing_is_stored_once_an_adapters_files_have_changed_beneath_a_request(
    start: Callable[[], Manager], tmp_path: Path, seed: int
) -> None:
    """The workers may load them anew at any time."""
    lora, named = adapter(str(write_adapter(tmp_path / "one", 1.0))), keys(seed)
    first = start()
    context = first.begin("r", lora_request=lora)
    assert first.found(context, named) == [MISS] * 4
    first.store(context, named[:2], seed)
    write_adapter(tmp_path / "one", 2.0)
    eventually(lambda: not trusted(first, "r"), "the change is seen")
    first.store(context, named[2:], seed)
    assert first.tier._core.totals["stored_chunks"] == 2


def test_request_stores_again_once_its_adapters_files_are_looked_at_again(
    start: Callable[[], Manager], tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: one look that came late was the end of all stores of the request."""
    lora, named = adapter(str(write_adapter(tmp_path / "one", 1.0))), keys(seed)
    first = start()
    context = first.begin("r", lora_request=lora)
    assert first.found(context, named) == [MISS] * 4
    with monkeypatch.context() as late:
        late.setattr(adapters, "_FRESH_S", -1.0)
        first.store(context, named[:2], seed)
    assert first.tier._core.totals["stored_chunks"] == 0
    first.store(context, named[2:], seed)
    assert first.tier._core.totals["stored_chunks"] == 2


def test_nothing_is_loaded_once_an_adapters_files_have_changed_beneath_a_request(
    start: Callable[[], Manager], tmp_path: Path, seed: int
) -> None:
    """As it is asked for again after a preemption."""
    lora, named = adapter(str(write_adapter(tmp_path / "one", 1.0))), keys(seed)
    first, second = start(), start()
    context = first.begin("r", lora_request=lora)
    assert first.found(context, named) == [MISS] * 4
    first.store(context, named, seed)
    again = second.begin("again", lora_request=lora)
    assert second.found(again, named) == [HIT] * 4
    write_adapter(tmp_path / "one", 2.0)
    eventually(lambda: not trusted(second, "again"), "the change is seen")
    second.forget()
    assert second.found(again, named) == [MISS] * 4


def test_reset_in_which_vllms_cache_was_not_reset_forgets_no_adapter(
    start: Callable[[], Manager], tmp_path: Path
) -> None:
    """vLLM resets its connector also where blocks in use keep it from resetting its own cache,
    which then has blocks of the old weights under the same hashes."""
    pool = SimpleNamespace(cached_block_hash_to_block=object())
    manager = start()
    manager.link.epochs.watch(SimpleNamespace(block_pool=pool))

    def known(number: int) -> bool:
        lora = adapter(str(tmp_path / "one"), number=number)
        manager.found(manager.begin("r", lora_request=lora), [key("x")])
        return trusted(manager, "r")

    write_adapter(tmp_path / "one", 1.0)
    assert known(1)
    write_adapter(tmp_path / "one", 2.0)
    assert not known(2)
    manager.reset()
    manager.link.was_reset()
    assert not known(2)
    pool.cached_block_hash_to_block = object()
    manager.reset()
    manager.link.was_reset()
    assert known(2)


# -- where a group's bytes lie ---------------------------------------------------------------------


def test_extents_are_those_that_a_group_uses_of_its_ranks_part() -> None:
    sizes = [100, 50]
    assert extents(0, sizes, [(0, 100), (1, 50)], 1) == ((0, 150),)
    assert extents(1000, sizes, [(0, 80)], 1) == ((1000, 80),)
    assert extents(0, sizes, [(0, 80), (1, 50)], 2) == ((0, 80), (100, 80), (200, 100))
    assert joined([(5, 5), (0, 5), (20, 4), (21, 1)]) == ((0, 10), (20, 4))
    assert joined([(0, 10), (0, 10)]) == ((0, 10),)


def spec(**fields: Any) -> Any:
    config = replace(offloading(), **fields)
    return SimpleNamespace(
        config=config,
        replicated_layout=config.replicated_layout,
        blocks_per_chunk=1,
        cpu_page_size_per_worker=BLOCK_BYTES,
    )


def ref(tensor: int, size: int, canonical: int = 0) -> Any:
    mapping = SimpleNamespace(canonical_page_size_bytes=canonical) if canonical else None
    return SimpleNamespace(tensor_idx=tensor, page_size_bytes=size, mapping=mapping)


CACHES = {name: torch.zeros((4, 2, 16), dtype=torch.float16) for name in "abc"}
CONFIG = cache_config(full(16), window(16, 64))


def seen(offloads: Any, *groups: list[Any]) -> RankRows:
    canonical = SimpleNamespace(
        tensors=[SimpleNamespace(page_size_bytes=4096)] * 2, group_data_refs=list(groups)
    )
    return rank_rows(model(), CONFIG, offloads, canonical, CACHES)


def test_worker_tells_what_each_group_uses_of_a_row() -> None:
    """A group of one layer and one of two, whose pages are padded."""
    parallel = replace(offloading(world_size=2).parallel, rank=1)
    rows = seen(spec(parallel=parallel), [ref(0, 4096), ref(1, 4096)], [ref(0, 4000)])
    assert rows.rank == 1
    assert [group.extents for group in rows.groups] == [((8192, 8192),), ((8192, 4000),)]
    assert rows.device == "cpu"


def test_canonical_rows_are_one_part_that_all_ranks_fill() -> None:
    groups = [ref(0, 4096, 8192), ref(1, 4096, 8192)], [ref(0, 4096, 6000)]
    one = seen(spec(canonical_layout=True), *groups)
    parallel = replace(offloading(world_size=2).parallel, rank=1)
    other = seen(spec(canonical_layout=True, parallel=parallel), *groups)
    assert [group.extents for group in one.groups] == [((0, 16384),), ((0, 6000),)]
    assert one.groups == other.groups


# -- namespaces ------------------------------------------------------------------------------------


def ids(
    engine: Any = None, offloads: Any = None, ranks: Any = None, weights: str = "w", salt: str = ""
) -> set[bytes]:
    made = identity.row_groups(
        engine or model(), offloads or offloading(), ranks or [ROWS], weights, salt
    )
    return {group.space.id for group in made.values()}


def rows(**fields: Any) -> list[RankRows]:
    return [replace(ROWS, groups=tuple(replace(group, **fields) for group in ROWS.groups))]


def drafting(path: str) -> Any:
    engine = model()
    draft = SimpleNamespace(
        model=path, revision=None, hf_config=SimpleNamespace(to_dict=lambda: {"layers": 1})
    )
    engine.speculative_config = SimpleNamespace(method="eagle", draft_model_config=draft)
    return engine


def two_ranks(**fields: Any) -> tuple[Any, list[RankRows]]:
    """Of which each has half of a row."""
    halves = [
        tuple(replace(group, extents=((4096 * rank, 4096),)) for group in ROWS.groups)
        for rank in range(2)
    ]
    ranks = [replace(ROWS, rank=rank, groups=halves[rank]) for rank in range(2)]
    return replace(offloading(world_size=2, tp_size=2), **fields), ranks


DIFFERENT: dict[str, Callable[[], set[bytes]]] = {
    "weights": lambda: ids(weights="others"),
    "salt": lambda: ids(salt="tenant"),
    "model": lambda: ids(offloads=replace(offloading(), model=OffloadingModelConfig("x", "auto"))),
    "config": lambda: ids(model(hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1e6}))),
    "dtype": lambda: ids(model(dtype=torch.bfloat16)),
    "length": lambda: ids(model(max_model_len=2048)),
    "quantization": lambda: ids(model(quantization="fp8")),
    "draft": lambda: ids(drafting("folder/eagle")),
    "media": lambda: ids(
        model(multimodal_config=SimpleNamespace(mm_processor_kwargs={"max_pixels": 200704}))
    ),
    "implementation": lambda: ids(model(model_impl="transformers")),
    "layout": lambda: ids(ranks=rows(layout="other")),
    "type of KV": lambda: ids(ranks=rows(kv_dtype="uint8/fp8")),
    "backend": lambda: ids(ranks=rows(attention_backend="CPU_ATTN/AVX2/vec")),
    "device": lambda: ids(ranks=[replace(ROWS, device="cuda")]),
    "order": lambda: ids(ranks=[replace(ROWS, order="BLHNC")]),
    "tokens of a chunk": lambda: ids(
        offloads=replace(offloading(), cache=OffloadingCacheConfig(16, 2))
    ),
    "tokens of a hash": lambda: ids(
        offloads=replace(offloading(), cache=OffloadingCacheConfig(8, 1))
    ),
    "ranks": lambda: ids(None, *two_ranks()),
    "agnostic ranks of another layout": lambda: ids(
        None,
        *two_ranks(
            parallel=offloading(world_size=2, tp_size=2, is_parallelism_agnostic=True).parallel
        ),
    ),
    "stages": lambda: ids(offloads=offloading(pp_size=2)),
    "context": lambda: ids(offloads=offloading(dcp_size=2)),
    "canonical": lambda: ids(offloads=replace(offloading(), canonical_layout=True)),
}


def test_groups_of_one_engine_are_apart() -> None:
    assert len(ids()) == 2


@pytest.mark.parametrize("name", DIFFERENT)
def test_engines_that_differ_share_nothing(name: str) -> None:
    assert not DIFFERENT[name]() & ids()


def test_another_version_of_vllm_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ids()
    monkeypatch.setattr(compat, "VERSION", "0.99.0")
    assert not ids() & before


def test_other_numbers_of_ranks_share_canonical_bytes_that_do_not_depend_on_them() -> None:
    alone = replace(offloading(is_parallelism_agnostic=True), canonical_layout=True)
    both = replace(
        offloading(world_size=2, tp_size=2, is_parallelism_agnostic=True), canonical_layout=True
    )
    assert ids(offloads=alone) == ids(offloads=both, ranks=[ROWS, replace(ROWS, rank=1)])


def test_row_of_two_ranks_is_one_page() -> None:
    made = identity.row_groups(model(), *two_ranks(), "w", "")
    assert made[0].extents == ((0, 8192),)
    assert made[0].space.page_bytes == 8192
    assert made[0].space.shards == 1


def test_weights_of_the_draft_model_count(tmp_path: Path) -> None:
    engine = model(model=str(checkpoint(tmp_path / "target", 1.0)), revision=None)
    alone = identity.all_weights(engine, read_settings({}))
    found = []
    for value in (1.0, 2.0):
        engine.speculative_config = drafting(
            str(checkpoint(tmp_path / f"draft {value}", value))
        ).speculative_config
        found.append(identity.all_weights(engine, read_settings({})))
    assert len({alone, *found}) == 3
    engine.speculative_config.method = "ngram"
    assert identity.all_weights(engine, read_settings({})) == alone
    assert identity.all_weights(engine, read_settings({"kvwarehouse.weights": "name"})) == "name"


def test_weights_that_changed_after_the_engine_began_are_its_own(tmp_path: Path) -> None:
    engine = model(model=str(checkpoint(tmp_path / "target", 1.0)), revision=None)
    weights = partial(identity.all_weights, engine, read_settings({}))
    assert weights() == weights()
    written = tmp_path / "target" / "model.safetensors"

    def newer() -> bool:
        written.touch()
        return written.stat().st_ctime > loaded_files.began_s()

    eventually(newer, "the file system's clock has gone on")
    assert weights() != weights()


def checkpoint(folder: Path, value: float) -> Path:
    folder.mkdir()
    save_file({"w": np.full((64, 64), value, np.float32)}, folder / "model.safetensors")
    loaded_files.began()  # what engines load is there before them
    return folder


def test_hashes_of_many_prompts_name_their_groups(rng: Any) -> None:
    """vLLM's own hashes, of 32 bytes: shorter ones might be the same for other tokens."""
    made = request(tokens(rng, 64))
    assert {len(one) for one in made.block_hashes} == {32}
