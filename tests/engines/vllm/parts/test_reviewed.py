"""What a review of the connector found, each with the incident it could have been."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_connectors.core.daemon_connection import ConnectionOptions, DaemonConnection
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.core.self_test import SelfTest
from kvwarehouse_connectors.vllm import compat, identity
from kvwarehouse_connectors.vllm.cache_layout import cache_groups
from kvwarehouse_connectors.vllm.messages import CacheInfo, GroupInfo, LoadOrder
from kvwarehouse_connectors.vllm.settings import read_settings
from kvwarehouse_connectors.vllm.worker import WorkerSide
from vllm_parts.halves import Engine, engine_config
from vllm_parts.requests import request, tokens
from vllm_parts.specs import config, full
from vllm_parts.tensors import caches, shapes


@pytest.fixture(scope="module")
def daemon() -> Iterator[kvw.PrivateDaemon]:
    with kvw.PrivateDaemon({"dram": "64MiB"}) as daemon:
        yield daemon


def test_self_test_through_the_warehouse_leaves_blocks_as_they_were(
    daemon: kvw.PrivateDaemon,
) -> None:
    """Random bytes can be NaN; a CPU's attention multiplies a block's unused end by 0, and 0 * NaN
    is NaN: whoever was given such a block later would have answered nonsense, and stored it."""
    cache = caches(shapes()["three layers"], KVCacheLayout.LBHNC, 9)
    before = cache.memory.copy()
    connection = DaemonConnection(daemon.address, ConnectionOptions(tick_s=0.01))
    try:
        eventually(lambda: connection.control() is not None, "a daemon")
        self_test = SelfTest(connection, stores=True)
        assert self_test.round_trip(cache.host(0), [3, 4])
        assert self_test._verdicts, "the test was not made"
    finally:
        connection.close()
    assert np.array_equal(before, cache.memory)


def test_blocks_of_a_load_that_failed_hold_zeros(
    daemon: kvw.PrivateDaemon, rng: random.Random
) -> None:
    """A load copies before it compares: what failed its check must not stay."""
    cache = caches(shapes()["three layers"], KVCacheLayout.LBHNC, 9)
    layers = [name for group in cache.config.kv_cache_groups for name in group.layer_names]
    cache.config.hash_block_size = 16
    settings = read_settings({"kvwarehouse.address": daemon.address}, "kv_both")
    worker = WorkerSide(engine_config(layers), cache.config, settings)
    try:
        worker.register(cache.by_layer, [torch.nn.Linear(8, 8)])
        cache.host(0).scatter([5], np.full((1, cache.host(0).block_bytes), 0xFF, np.uint8))
        run = PageRun(0, [b"k" * 32], [5], True)
        worker._loads.report(LoadOrder("r", (run,)), [])
        rows = np.full((1, cache.host(0).block_bytes), 1, np.uint8)
        cache.host(0).gather([5], rows)
        assert not rows.any()
        assert worker.results()[0] == {"r"}
    finally:
        worker.close()


def test_staging_in_which_no_block_fits_refuses_the_start(daemon: kvw.PrivateDaemon) -> None:
    """Else nothing is ever stored, and nobody is told."""
    cache = caches(shapes()["three layers"], KVCacheLayout.LBHNC, 9)
    layers = [name for group in cache.config.kv_cache_groups for name in group.layer_names]
    block_bytes = cache.host(0).block_bytes

    def register(staging_bytes: int, role: str = "kv_both") -> None:
        settings = read_settings({"kvwarehouse.address": daemon.address}, role)
        settings = replace(settings, staging_bytes=staging_bytes)
        worker = WorkerSide(engine_config(layers), cache.config, settings)
        try:
            worker.register(cache.by_layer, [torch.nn.Linear(8, 8)])
        finally:
            worker.close()

    with pytest.raises(kvw.UsageError, match=f"Use at least {2 * block_bytes}"):
        register(2 * block_bytes - 1)
    register(2 * block_bytes)
    register(2 * block_bytes - 1, "kv_consumer")


def test_ranks_of_a_host_share_its_memory_for_stores(
    daemon: kvw.PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took up to 2 GiB of it, as if it were alone; also where its cache is on a GPU, and pages
    go through the host's memory."""
    known, pages = os.sysconf, (36 << 30) // os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(os, "sysconf", lambda n: pages if n == "SC_PHYS_PAGES" else known(n))
    cache = caches(shapes()["three layers"], KVCacheLayout.LBHNC, 9)
    layers = [name for group in cache.config.kv_cache_groups for name in group.layer_names]
    settings = read_settings({"kvwarehouse.address": daemon.address}, "kv_both")
    for ranks in (1, 2):
        worker = WorkerSide(engine_config(layers, ranks=ranks), cache.config, settings)
        try:
            worker._vllm_config.scheduler_config.max_num_batched_tokens = 1 << 30
            worker._memories.append(cache.host(0))
            assert worker._staging_bytes(torch.device("cuda")) == (1 << 30) // ranks
        finally:
            worker.close()


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_log_says_how_much_staging_a_step_needs_where_it_is_more(
    role: str, daemon: kvw.PrivateDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Else most of each long prompt is left out, and nobody knows why there is no hit."""
    cache = caches(shapes()["three layers"], KVCacheLayout.LBHNC, 9)
    layers = [name for group in cache.config.kv_cache_groups for name in group.layer_names]
    settings = read_settings({"kvwarehouse.address": daemon.address}, role)
    config = engine_config(layers)
    worker = WorkerSide(config, cache.config, settings)
    try:
        needed = 2 * cache.host(0).block_bytes * 4096
        config.scheduler_config.max_num_batched_tokens = 4096 * worker._groups[0].block_tokens
        worker._settings = replace(settings, staging_bytes=needed)
        worker.register(cache.by_layer, [torch.nn.Linear(8, 8)])
        assert caplog.messages == []
        config.scheduler_config.max_num_batched_tokens *= 2
        assert worker._staging_bytes(torch.device("cpu")) == needed
        told = [message for message in caplog.messages if f"{2 * needed >> 20}MiB" in message]
        assert len(told) == (role == "kv_both")
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("method", "served"),
    [
        ("ngram", True),
        ("suffix", True),
        ("draft_model", True),
        ("eagle", True),
        ("eagle3", True),
        ("dflash", False),
        ("medusa", False),
    ],
)
def test_drafts_are_served_where_it_is_known_on_what_their_kv_depends(
    method: str, served: bool
) -> None:
    engine = engine_config(["layer.0"])
    engine.speculative_config = SimpleNamespace(method=method)
    problem = compat.engine_problem(engine)
    assert (problem == "") is served
    assert served or method in problem
    engine.speculative_config.parallel_drafting = True
    assert compat.engine_problem(engine) or method in ("ngram", "suffix")


@pytest.mark.parametrize(
    ("model", "layers", "served"),
    [
        ("DeepSeekMTPModel", 1, True),
        ("DeepSeekMTPModel", 2, False),
        ("Gemma4MTPModel", 1, False),
    ],
)
def test_mtp_is_served_with_one_layer_of_a_known_model(
    model: str, layers: int, served: bool
) -> None:
    """A second layer sees one token further; Gemma's reads the target's own KV."""
    engine = engine_config(["layer.0"])
    hf_config = SimpleNamespace(architectures=[model], n_predict=layers)
    engine.speculative_config = SimpleNamespace(
        method="mtp", draft_model_config=SimpleNamespace(hf_config=hf_config)
    )
    problem = compat.engine_problem(engine)
    assert (problem == "") is served
    assert served or model in problem


def test_draft_is_part_of_what_names_a_namespace() -> None:
    def drafting(**change: Any) -> Any:
        engine = engine_config(["layer.0"])
        draft = SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8}),
            dtype=torch.float16,
            quantization=None,
        )
        fields = {"method": "eagle", "draft_model_config": draft, **change}
        engine.speculative_config = SimpleNamespace(**fields)
        return identity.draft_identity(engine, settings, settings.weights)

    settings = read_settings({"kvwarehouse.weights": "w"}, "kv_both")
    one = drafting()
    assert one == drafting()
    assert one != drafting(method="draft_model")
    other = replace(settings, weights="x")
    settings = other
    assert one != drafting()
    assert identity.draft_identity(engine_config(["layer.0"]), settings, "w") == ""


def _spaces(engine: Any) -> Any:
    groups = cache_groups(config(full(16), hash_tokens=16))
    cache_info = CacheInfo((GroupInfo(4096, "layout", "bfloat16", "CPU"),), "cpu", 1 << 20)
    return identity.namespaces(engine, groups, cache_info, identity.Shared("w", "h/1", 1, ""))


@pytest.mark.parametrize(
    "other",
    [{"max_model_len": 131_072}, {"override_generation_config": {"attn_temperature_tuning": True}}],
)
def test_engines_that_scale_positions_otherwise_share_nothing(other: dict[str, Any]) -> None:
    """LongRoPE picks its factors, and Llama 4 its attention's temperature, by the length that an
    engine was started with."""
    one, another = engine_config(["layer.0"]), engine_config(["layer.0"])
    for name, value in other.items():
        setattr(another.model_config, name, value)
    assert [s.id for s in _spaces(one)] != [s.id for s in _spaces(another)]
    assert [s.id for s in _spaces(one)] == [s.id for s in _spaces(engine_config(["layer.0"]))]


def test_sessions_whose_tokens_may_be_taken_back_are_neither_loaded_nor_stored(
    daemon: kvw.PrivateDaemon, rng: random.Random
) -> None:
    def groups() -> Any:
        return config(full(16), hash_tokens=16).kv_cache_groups

    with Engine(daemon.address, groups) as engine:
        session = request(tokens(rng, 64), name="session", resumable=True)
        engine.scheduler.on_new_request(session)
        tracked = engine.scheduler._requests["session"]
        assert not tracked.loads
        assert not tracked.stores
