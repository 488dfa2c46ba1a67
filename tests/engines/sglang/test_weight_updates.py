"""Weights that are changed in a running engine, by each of SGLang's own ways: nothing is loaded
that others computed, and nothing is stored where others' is found.

Real are SGLang's plugins, its classes that write to weights, and the parts of conftest.py; the
model is a module with one matrix, and no scheduler runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from sglang.srt import runtime_context
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.sglang import plugin
from kvwarehouse_connectors.sglang.weight_updates import UPDATES
from sglang_rig.engine import prompt
from sglang_rig.pools import PAGE


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)

    def load_weights(self, named: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in named:
            parameters[name].copy_(tensor)


@pytest.fixture(autouse=True)
def of_this_test() -> Iterator[None]:
    with runtime_context.get_context().override_server_args(model_path="tiny"):
        yield
    UPDATES.__init__()  # type: ignore[misc] - the process goes on with other tests


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def updater(model: Model) -> WeightUpdater:
    def nothing(*_: Any, **__: Any) -> None:
        pass

    return WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=SimpleNamespace(dtype=torch.float32, model_path="none"),
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=nothing,
        recapture_cuda_graph=nothing,
        get_model_runner=lambda: SimpleNamespace(model=model),
    )


NEW = [("matrix", torch.ones(8, 8))]

UPDATES_OF_SGLANG: dict[str, Callable[[WeightUpdater], Any]] = {
    "tensor": lambda updater: updater.update_weights_from_tensor(NEW, load_format="direct"),
    "distributed": lambda updater: updater.load_weights_from_distributed(NEW),
    "begin, as before RDMA": lambda updater: updater.begin_weight_update(),
    "end": lambda updater: updater.end_weight_update(run_post_load=False),
    "disk, which fails": lambda updater: updater.update_weights_from_disk("/none", "auto"),
    "ipc, which fails": lambda updater: updater.update_weights_from_ipc(SimpleNamespace()),
    "reset of tensors": lambda _: ModelRunner.check_weights(
        MagicMock(), action="reset_tensors", role="target"
    ),
}


@pytest.mark.parametrize("how", UPDATES_OF_SGLANG)
def test_after_an_update_nothing_is_loaded_and_nothing_is_stored(
    start: Any, shared: Serving, updater: WeightUpdater, seed: int, how: str
) -> None:
    tokens, others = prompt(seed, 3), prompt(seed + 1, 3)
    engine = start(shared.address)
    engine.store(tokens, seed)
    assert engine.prefetch(tokens).hit == 3 * PAGE
    with contextlib.suppress(Exception):  # one that failed may have written a part
        UPDATES_OF_SGLANG[how](updater)
    assert engine.prefetch(tokens).hit == 0
    assert engine.store(others, seed)[0] == 0
    UPDATES.__init__()  # type: ignore[misc] - as another engine's process, with the old weights
    again = start(shared.address)
    assert again.prefetch(others).hit == 0, "the store is not poisoned"
    assert again.prefetch(tokens).hit == 3 * PAGE


def test_an_update_by_tensors_is_a_real_one(updater: WeightUpdater, model: Model) -> None:
    updater.update_weights_from_tensor(NEW, load_format="direct")
    assert model.matrix.sum() == 64
    assert UPDATES.writes == 1


def test_what_only_reads_the_weights_changes_nothing(
    start: Any, shared: Serving, updater: WeightUpdater, seed: int
) -> None:
    tokens = prompt(seed, 3)
    engine = start(shared.address)
    engine.store(tokens, seed)
    ModelRunner.check_weights(MagicMock(), action="checksum", role="target")
    updater.destroy_weights_update_group("none")
    assert engine.prefetch(tokens).hit == 3 * PAGE


def flush(*, idle: bool) -> bool:
    scheduler = MagicMock()
    scheduler.is_fully_idle.return_value = idle
    scheduler.waiting_queue, scheduler.running_batch.reqs = [], []
    return bool(Scheduler.flush_cache(scheduler, empty_cache=False))


def test_new_weights_need_a_flushed_cache_and_a_name_of_their_own(
    start: Any, shared: Serving, updater: WeightUpdater, seed: int
) -> None:
    """SGLang's own cache may still have KV of the old weights, which would be stored."""
    updater.load_weights_from_distributed(NEW)
    for flushed in (None, flush(idle=False)):
        assert not flushed
        with pytest.raises(kvw.UsageError, match="cache was not flushed"):
            start(shared.address, **{"kvwarehouse.weights": "step-2"})
    assert flush(idle=True)
    with pytest.raises(kvw.UsageError, match="they were changed since this engine began") as told:
        start(shared.address, **{"kvwarehouse.weights": ""})
    assert told.value.code == "no_weights"
    engine = start(shared.address, **{"kvwarehouse.weights": "step-2"})
    assert engine.store(prompt(seed, 2), seed)[0] == 2 * PAGE


def test_a_name_of_weights_that_were_changed_is_refused(
    start: Any, shared: Serving, updater: WeightUpdater
) -> None:
    """As where a script attaches again with the configuration that it had."""
    start(shared.address, **{"kvwarehouse.weights": "step-1"})
    updater.load_weights_from_distributed(NEW)
    flush(idle=True)
    with pytest.raises(kvw.UsageError, match="'step-1', as before the weights were changed"):
        start(shared.address, **{"kvwarehouse.weights": "step-1"})
    start(shared.address, **{"kvwarehouse.weights": "step-2"})


class Memory:
    """In the place of torch_memory_saver; keeps: what the weights are given back with."""

    def __init__(self, model: Model, keeps: bool) -> None:
        self._model, self._keeps = model, keeps

    def pause(self, tag: str) -> None:
        if tag == "weights" and not self._keeps:
            self._model.matrix.fill_(7)

    def resume(self, tag: str) -> None:
        pass


def manager(model: Model, keeps: bool) -> SchedulerWeightUpdaterManager:
    made = object.__new__(SchedulerWeightUpdaterManager)
    made.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    made.memory_saver_adapter = Memory(model, keeps)
    made.is_fully_idle = lambda **_: True
    made.flush_cache = lambda **_: True
    made.scheduler, made.offload_tags = None, set()
    made.tp_cpu_group = dist.group.WORLD
    return made


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_weights_that_come_back_are_served_if_they_are_those_that_went(
    start: Any, shared: Serving, model: Model, seed: int, keeps: bool, tags: Any
) -> None:
    tokens = prompt(seed, 3)
    engine = start(shared.address)
    engine.store(tokens, seed)
    memory = manager(model, keeps)
    with runtime_context.get_context().override_server_args(weight_cache_mode="off"):
        memory.release_memory_occupation(SimpleNamespace(tags=tags))
        assert engine.prefetch(tokens).hit == 0, "there are no weights now"
        assert engine.store(prompt(seed + 1, 2), seed)[0] == 0
        with pytest.raises(kvw.UsageError, match="out of memory"):
            start(shared.address)
        memory.resume_memory_occupation(SimpleNamespace(tags=tags))
    assert engine.prefetch(tokens).hit == (3 * PAGE if keeps else 0)


def test_memory_of_the_cache_alone_is_of_no_concern(
    start: Any, shared: Serving, model: Model, seed: int
) -> None:
    tokens = prompt(seed, 3)
    engine = start(shared.address)
    engine.store(tokens, seed)
    memory = manager(model, keeps=True)
    memory.memory_saver_adapter = TorchMemorySaverAdapter.create(False)
    memory.release_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
    assert engine.prefetch(tokens).hit == 3 * PAGE


def test_an_engine_whose_hooks_are_not_there_is_refused(
    start: Any, shared: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where SGLANG_PLUGINS leaves the plugin out, or where another SGLang has other methods."""
    assert plugin.unseen() == []
    hooked = WeightUpdater.load_weights_from_distributed
    monkeypatch.setattr(WeightUpdater, "load_weights_from_distributed", hooked.__wrapped__)
    monkeypatch.delattr(ModelRunner, "check_weights")
    with pytest.raises(kvw.UsageError, match="SGLANG_PLUGINS") as refused:
        start(shared.address)
    for name in ("WeightUpdater.load_weights_from_distributed", "ModelRunner.check_weights"):
        assert name in str(refused.value)


def test_a_method_that_a_later_version_adds_counts_as_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WeightUpdater, "update_weights_by_magic", lambda _: None, raising=False)
    assert [one.rsplit(".", 1)[1] for one in plugin.unseen()] == ["update_weights_by_magic"]
