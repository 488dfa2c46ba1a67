"""Counts of all ranks add up, survive vLLM's transport, and reach its Prometheus page."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig

from kvwarehouse_connectors.vllm.connector import WarehouseConnector
from kvwarehouse_connectors.vllm.stats import COUNTERS, WarehousePromMetrics, WarehouseStats

LABELS = ["model_name", "engine"]


@st.composite
def stats(draw: st.DrawFn) -> WarehouseStats:
    made = WarehouseStats.empty()
    for name in draw(st.lists(st.sampled_from(sorted(COUNTERS)), max_size=8)):
        made.add(name, draw(st.integers(0, 1 << 40)))
    return made


@given(st.lists(stats(), min_size=1, max_size=5))
def test_counts_of_ranks_add_up_in_any_order(parts: list[WarehouseStats]) -> None:
    forward, backward = parts[0], parts[-1]
    for part in parts[1:]:
        forward = forward.aggregate(part)
    for part in reversed(parts[:-1]):
        backward = backward.aggregate(part)
    expected = {name: sum(part.data[name] for part in parts) for name in COUNTERS}
    assert forward.data == backward.data == expected
    assert forward.is_empty() == (not any(expected.values()))


@given(stats())
def test_counts_survive_the_way_between_processes(one: WarehouseStats) -> None:
    assert pickle.loads(pickle.dumps(one)).data == one.data
    sent = json.loads(json.dumps(one.data))
    again = WarehouseConnector.build_kv_connector_stats(sent)
    assert isinstance(again, WarehouseStats)
    assert again.data == one.data


def test_counts_start_anew_when_reset() -> None:
    one = WarehouseStats.empty()
    one.add("loaded_blocks", 3)
    assert one.reduce() == {"loaded_blocks": 3}
    one.reset()
    assert one.is_empty()
    assert one.reduce() == {}
    assert WarehouseConnector.build_kv_connector_stats(None) == WarehouseStats.empty()


def test_unknown_count_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        WarehouseStats.empty().add("loaded_bloks")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def metrics(registry: CollectorRegistry) -> WarehousePromMetrics:
    def of(kind: Any) -> Any:
        return lambda **options: kind(registry=registry, **options)

    class Config:
        kv_transfer_config = KVTransferConfig(kv_connector="WarehouseConnector", kv_role="kv_both")

    return WarehouseConnector.build_prom_metrics(
        Config(),
        {Gauge: of(Gauge), Counter: of(Counter), Histogram: of(Histogram)},
        LABELS,
        {0: ["m", "0"], 1: ["m", "1"]},
    )


def test_metrics_count_up_per_engine_under_their_names(registry: CollectorRegistry) -> None:
    page = metrics(registry)
    page.observe({"loaded_blocks": 5, "stored_bytes": 7}, 0)
    page.observe({"loaded_blocks": 2}, 1)
    page.observe({"loaded_blocks": 1, "of_a_later_version": 9}, 0)

    def value(name: str, engine: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", "engine": engine})

    assert value("kvwarehouse_connector_loaded_blocks_total", "0") == 6
    assert value("kvwarehouse_connector_loaded_blocks_total", "1") == 2
    assert value("kvwarehouse_connector_stored_bytes_total", "0") == 7
    for name in COUNTERS:
        assert value(f"kvwarehouse_connector_{name}_total", "1") is not None
