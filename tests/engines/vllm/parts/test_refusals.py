"""Engines that cannot be served, refused by name: by their configuration before anything of them
is there, by their weights' files at the start."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse as kvw
from kvwarehouse_connectors.vllm import compat, loaded_files, plugin
from kvwarehouse_connectors.vllm.connector import WarehouseConnector
from kvwarehouse_connectors.vllm.refusals import checked_settings
from kvwarehouse_connectors.vllm.scheduler import SchedulerSide
from kvwarehouse_connectors.vllm.settings import read_settings
from vllm_parts.halves import Engine, engine_config


def configured(connector: str = plugin.NAME, **extra: Any) -> Any:
    config = engine_config(["a", "b"], revision=None)
    config.load_config.download_dir = None
    config.kv_transfer_config = SimpleNamespace(
        kv_connector=connector,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={f"kvwarehouse.{name}": value for name, value in extra.items()},
    )
    return config


REFUSED: list[tuple[Callable[[Any], None], str]] = [
    (lambda c: setattr(c.parallel_config, "nnodes_within_dp", 2), "several hosts"),
    (lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2), "context"),
    (lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2), "context"),
    (lambda c: setattr(c.model_config, "is_encoder_decoder", True), "encoder-decoder"),
    (lambda c: setattr(c.load_config, "load_format", "dummy"), "dummy"),
    (lambda c: setattr(c.kv_transfer_config, "kv_load_failure_policy", "fail"), "recompute"),
    (lambda c: c.kv_transfer_config.kv_connector_extra_config.update({"kvwarehouse.x": 1}), "x"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_engine_that_cannot_be_served_is_refused_by_its_configuration(
    change: Callable[[Any], None], words: str
) -> None:
    config = configured()
    assert WarehouseConnector.get_required_kvcache_layout(config) is None
    change(config)
    with pytest.raises(kvw.UsageError, match=words):
        WarehouseConnector.get_required_kvcache_layout(config)


def test_engine_is_refused_where_its_configuration_is_made_and_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class EngineArgs:
        def create_engine_config(self, config: Any) -> Any:
            return config

    module = SimpleNamespace(EngineArgs=EngineArgs)
    monkeypatch.setitem(plugin.sys.modules, "vllm.engine.arg_utils", module)  # type: ignore[arg-type]
    marks: list[Any] = []
    monkeypatch.setattr(compat, "mark_named_media", marks.append)
    plugin.register()
    wrapped = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is wrapped, "once is enough"
    served = configured()
    assert EngineArgs().create_engine_config(served) is served
    of_others = configured("AnotherConnector", unknown=1)
    assert EngineArgs().create_engine_config(of_others) is of_others
    assert marks == [served]
    of_the_tier = configured("WarehouseOffloadingConnector", unknown=1)
    assert EngineArgs().create_engine_config(of_the_tier) is of_the_tier
    assert marks == [served, of_the_tier]
    with pytest.raises(kvw.UsageError, match="unknown"):
        EngineArgs().create_engine_config(configured(unknown=1))


def test_engine_begins_where_its_configuration_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or before, with its process: but an interpreter may have written the weights itself."""

    class EngineArgs:
        def create_engine_config(self) -> Any:
            monkeypatch.setattr(loaded_files, "_began_s", 0.0)
            return configured("AnotherConnector")

    plugin._check_configurations_of(EngineArgs)
    before_s = time.time()
    EngineArgs().create_engine_config()
    assert before_s <= loaded_files.began_s() <= time.time()


def test_name_of_the_weights_serves_an_engine_of_dummies() -> None:
    config = configured(weights="seven")
    config.load_config.load_format = "dummy"
    assert checked_settings(config).weights == "seven"


def test_model_whose_files_are_not_there_is_refused_by_name(engine: Engine) -> None:
    config = configured()
    config.model_config.model = "no/such-model"
    with pytest.raises(kvw.UsageError, match="no/such-model"):
        SchedulerSide(config, engine.caches[0].config, read_settings({}, "kv_both"))
