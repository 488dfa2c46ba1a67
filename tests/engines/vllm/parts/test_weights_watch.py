"""Weights that change under both halves of the connector: the model is a matrix, and each block is
filled with the number of the weights that computed it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import numpy as np
from torch import nn

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core.live_weights import LiveWeights
from kvwarehouse_connectors.vllm import compat
from vllm_parts.halves import Engine
from vllm_parts.prompts import one_group
from vllm_parts.requests import request, tokens

_MIXED = 255
_PROMPT = 160
_BLOCKS = list(range(1, 11))


@dataclass
class Life:
    """An engine from start to end, with vLLM's own cache as it is seen from outside: which prompts
    it holds, and by which weights."""

    engine: Engine
    weights: int
    names: int = 0
    cached: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.manager = SimpleNamespace(
            block_pool=SimpleNamespace(cached_block_hash_to_block=object())
        )
        self.engine.scheduler.set_cache_manager(self.manager)
        eventually(lambda: self.engine.scheduler._matcher() is not None, "the daemon is found")

    def change(self, weights: int) -> None:
        self.weights = weights
        for model in self.engine.models:
            nn.init.constant_(model.weight, weights)

    def reset(self, *, connector: bool = False) -> None:
        self.manager.block_pool.cached_block_hash_to_block = object()
        self.cached.clear()
        if connector:
            self.engine.scheduler.reset()

    def ask(self, ids: tuple[int, ...]) -> bool:
        """As vLLM would: its own cache first, ours next, the rest is computed. Checks what was
        loaded; whether it was ours."""
        self.names += 1
        one = request([*ids, 1], name=f"r{self.names}")
        scheduler = self.engine.scheduler
        scheduler.on_new_request(one)
        local = self.cached.get(ids)
        tokens_found, _ = scheduler.matched(one, _PROMPT if local is not None else 0)
        loaded = False
        if tokens_found:
            assert tokens_found == _PROMPT
            self._spoil()
            scheduler.allocated(one, [_BLOCKS], tokens_found)
            self.engine.ended(one)
            loaded = not (self.engine.bad_blocks or one.request_id in self.engine.failed)
            self.engine.bad_blocks.clear()
        if loaded:
            found = {int(value) for page in self.engine.pages(_BLOCKS)[0] for value in set(page)}
            assert found == {self.weights}, f"KV of {found} for weights {self.weights}"
            local = self.weights
        if local is None:
            self._spoil(self.weights)
            local = self.weights
            self.engine.compute(one, [_BLOCKS], _PROMPT)
        elif local != self.weights:
            local = _MIXED
        self.cached[ids] = local
        scheduler.finished(one)
        self._settle()
        return loaded

    def extend(self, ids: tuple[int, ...]) -> None:
        """Another request that begins with a prompt of vLLM's own cache: what is computed on KV of
        other weights is of neither."""
        if ids not in self.cached:
            return
        longer = self.longer(ids)
        self.engine.scheduler.on_new_request(longer)
        self.engine.scheduler.matched(longer, _PROMPT)
        self.engine.scheduler.allocated(longer, [], 0)
        self._spoil(self.weights if self.cached[ids] == self.weights else _MIXED)
        longer.num_computed_tokens = _PROMPT
        self.engine.compute(longer, [[*_BLOCKS, *range(20, 30)]], _PROMPT)
        self.engine.scheduler.finished(longer)
        self._settle()

    def longer(self, ids: tuple[int, ...]) -> Any:
        """Another request that begins with a prompt."""
        self.names += 1
        return request([*ids, *range(_PROMPT), 1], name=f"r{self.names}")

    def _settle(self) -> None:
        self.engine.settle()
        self.engine.step()

    def _spoil(self, value: int = _MIXED) -> None:
        blocks = [*_BLOCKS, *range(20, 30)]
        for cache in self.engine.caches:
            memory = cache.host(0)
            memory.scatter(blocks, np.full((len(blocks), memory.block_bytes), value, np.uint8))


def _matrix(weights: int) -> nn.Module:
    made = nn.Linear(64, 64)
    nn.init.constant_(made.weight, weights)
    return made


def _engine(serving: Serving, weights: int, **more: Any) -> Engine:
    return Engine(
        serving.address,
        one_group,
        settings={"weights": f"w{weights}"},
        model=lambda: _matrix(weights),
        **more,
    )


@pytest.fixture
def life(serving: Serving) -> Iterator[Life]:
    with _engine(serving, 0) as engine:
        yield Life(engine, 0)


def test_other_weights_and_a_plain_reset_cost_one_prompt(life: Life, rng: random.Random) -> None:
    old, new = (tuple(tokens(rng, _PROMPT)) for _ in range(2))
    life.ask(old)
    life.change(1)
    life.reset()
    assert not life.ask(old), "the step that sees the change"
    life.reset()
    life.ask(new)
    life.reset()
    assert life.ask(new), "what it stores from now on is loaded"
    assert not life.ask(old)


def test_other_weights_without_a_reset_end_loads_and_stores_until_there_is_one(
    life: Life, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    old, new, mixed = (tuple(tokens(rng, _PROMPT)) for _ in range(3))
    life.ask(old)
    life.reset()
    life.change(1)
    life.ask(mixed)
    life.change(0)  # back again: KV of 1 is still in the cache
    del life.cached[mixed]
    assert not life.ask(mixed)
    life.change(1)
    life.engine.workers[0].stats()
    for _ in range(3):
        del life.cached[mixed]
        assert not life.ask(mixed)
    assert life.engine.workers[0].stats() is None, "copies are made for nothing"
    assert caplog.text.count("until that cache is reset") == 1, "said once, not with each step"
    life.reset()
    life.ask(new)
    life.reset()
    assert life.ask(new)


def test_reset_that_vllm_could_not_make_does_not_end_the_wait_for_one(
    life: Life, rng: random.Random
) -> None:
    """It resets the connector even where requests have blocks of its own cache."""
    ids = tuple(tokens(rng, _PROMPT))
    life.ask(ids)
    life.change(1)
    life.ask(tuple(tokens(rng, _PROMPT)))
    life.engine.scheduler.reset()
    life.extend(ids)
    life.reset()
    life.ask(tuple(tokens(rng, _PROMPT)))
    assert life.engine.promised(life.longer(ids)) == 0


def test_plain_reset_with_the_same_weights_keeps_what_is_stored_and_says_so(
    life: Life, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tuple(tokens(rng, _PROMPT))
    life.ask(ids)
    life.change(0)  # a reload of the same
    with caplog.at_level("INFO"):
        life.reset()
        assert life.ask(ids)
    assert "reset_external=true" in caplog.text
    life.reset(connector=True)
    assert not life.ask(ids)


def test_ranks_that_see_a_change_in_different_steps_agree(
    serving: Serving, rng: random.Random
) -> None:
    with _engine(serving, 0, ranks=2) as engine:
        life = Life(engine, 0)
        ids = tuple(tokens(rng, _PROMPT))
        life.ask(ids)
        life.reset()
        nn.init.constant_(engine.models[1].weight, 1)
        assert not life.ask(ids), "one rank's page is of other weights"
        life.change(1)
        life.reset()
        life.ask(ids)
        life.reset()
        life.ask(ids)
        life.reset()
        assert life.ask(ids)


def test_weights_that_cannot_be_read_are_not_served(
    life: Life, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tuple(tokens(rng, _PROMPT))
    life.ask(ids)
    life.reset()

    def lost(self: LiveWeights) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(LiveWeights, "sample", lost)
        assert not life.ask(ids)
    with pytest.raises(kvw.UsageError, match="could not be seen"):
        life.engine.workers[0].register(life.engine.caches[0].by_layer, [nn.ReLU()])


def test_weights_are_not_read_in_a_step_that_does_nothing(
    life: Life, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client asked an engine that slept, and hung up: the abort makes a step, on a GPU weights
    were not mapped, and reading them ended the worker."""
    ids = tuple(tokens(rng, _PROMPT))
    life.ask(ids)
    life.reset()
    read: list[None] = []
    sample = LiveWeights.sample
    monkeypatch.setattr(LiveWeights, "sample", lambda self: (read.append(None), sample(self))[1])
    queued = request([*ids, 1], name="queued")
    life.engine.scheduler.on_new_request(queued)
    life.engine.scheduler.finished(queued)
    life.engine.step()
    assert not read
    assert life.ask(ids), "a step with a load"
    assert read


def test_models_are_found_by_their_layers() -> None:
    class Layer(nn.Module):
        pass

    layers = {"0.attn": Layer(), "1.attn": Layer(), "draft.attn": Layer()}
    model = nn.ModuleList([nn.ModuleList([layers["0.attn"]]), nn.ModuleList([layers["1.attn"]])])
    draft = nn.ModuleList([layers["draft.attn"]])
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert compat.models_with(config, ["0.attn", "1.attn"]) == [model]
    assert {id(one) for one in compat.models_with(config, layers)} == {id(model), id(draft)}
    draft.register_module("left_out", None)
    assert compat.models_with(config, ["unknown"]) == []
    del model
    gc.collect()
    assert compat.models_with(config, ["0.attn"]) == []


def test_no_order_of_changes_resets_and_restarts_serves_kv_of_other_weights(
    serving: Serving, rng: random.Random
) -> None:
    prompts = [tuple(tokens(rng, _PROMPT)) for _ in range(3)]
    hits = 0
    for _ in range(15):
        first = rng.randrange(2)
        with _engine(serving, first) as engine:
            life = Life(engine, first)
            for _ in range(14):
                act = rng.randrange(9)
                if act == 0:
                    life.change(rng.randrange(3))
                elif act == 1:
                    life.reset()
                elif act == 2:
                    life.reset(connector=True)
                elif act == 3:
                    life.engine.scheduler.reset()  # and vLLM could not reset its own cache
                elif act == 4:
                    life.extend(rng.choice(prompts))
                else:
                    hits += life.ask(rng.choice(prompts))
    assert hits, "nothing was ever loaded: the test proves nothing"
