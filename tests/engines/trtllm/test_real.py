"""The connector on TensorRT-LLM's own base classes and layout types, driven by the contract model
of its executor. Runs where `tensorrt_llm` imports; the whole engine, on a GPU, is not run here."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from trtllm_model import interface

if interface.stands_for_it():
    pytest.skip(
        "TensorRT-LLM is not installed (its wheels are on its vendor's index alone): only the"
        " contract model was run",
        allow_module_level=True,
    )

import kvwarehouse as kvw
from kvwarehouse_connectors.trtllm import compat
from kvwarehouse_connectors.trtllm.connector import WarehouseScheduler, WarehouseWorker
from trtllm_model.ranks import Engine, Spec


def test_shells_are_made_of_the_real_base_classes() -> None:
    for shell in (WarehouseScheduler, WarehouseWorker):
        assert inspect.getmodule(shell.__mro__[1]).__name__ in interface.PATHS.values()
        compat.check_interface(shell)
        assert not shell.__abstractmethods__


def test_batches_have_the_fields_that_are_read() -> None:
    base: Any = inspect.getmodule(WarehouseScheduler.__mro__[1])
    fields = [field.name for field in dataclasses.fields(base.RequestData)]
    read = ["request_id", "new_tokens", "new_block_ids", "computed_position"]
    assert fields[:5] == [*read, "num_scheduled_tokens"]
    assert set(fields) <= {f.name for f in dataclasses.fields(interface.RequestData)}


@pytest.mark.parametrize("load", ["async", "sync"])
def test_engine_of_the_model_reuses_blocks_over_the_real_base_classes(
    load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_KVW_WEIGHTS", "model-1")
    monkeypatch.setenv("TLLM_KVW_LOOKUP_BUDGET_S", "10")
    monkeypatch.setenv("TLLM_KVW_LOAD", load)
    with kvw.embedded(dram="64MiB") as client:
        for expected in (0, 56):
            with Engine(Spec(), client.address) as engine:
                assert engine.ready().serve(list(range(60)), 3) == expected
                engine.wait_stored(0 if expected else 7)
