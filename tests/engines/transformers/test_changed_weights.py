"""A model that is trained, or gets other weights, after it was joined: KV of the one weights is
never loaded under the others, nor stored where the others' is found."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-engines installs it")

import torch

from kvwarehouse_connectors.transformers import PrefillOptions, StoreState, WarehousePrefill

OPTIONS = PrefillOptions(page_tokens=16, chunk_tokens=32, room_tokens=8)


def joined(model: Any, warehouse: Any, weights: str = "old") -> WarehousePrefill:
    return WarehousePrefill(model, warehouse, weights=weights, options=OPTIONS)


@pytest.fixture
def own(model: Any) -> Any:
    return copy.deepcopy(model)


def take_a_step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ids = torch.arange(20).unsqueeze(0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def load_another_state(model: Any) -> None:
    model.load_state_dict({name: -one for name, one in model.state_dict().items()})


def write_data_of_one_layer(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.weight.data.copy_(torch.eye(64))


def quantize_in_place(model: Any) -> None:
    for parameter in model.parameters():
        scale = parameter.detach().abs().max() / 7
        parameter.data = (parameter.detach() / scale).round() * scale


def merge_an_adapter(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data += 0.05


def begin_another_adapter(model: Any) -> None:
    """It changes nothing yet; as it is trained, only tensors do that were not there before."""
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_parameter("lora_B", torch.nn.Parameter(torch.zeros(2, 32)))


CHANGES = [
    take_a_step,
    load_another_state,
    write_data_of_one_layer,
    quantize_in_place,
    merge_an_adapter,
    begin_another_adapter,
]


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_load_nothing_and_store_nothing(
    own: Any, warehouse: Any, prompt: Any, change: Callable[[Any], None], caplog: Any
) -> None:
    with joined(own, warehouse) as prefiller:
        prefiller.prefill(prompt)
        assert prefiller.flush()
        assert prefiller.prefill(prompt).tokens_loaded == 128
        stores = warehouse.stores
        change(own)
        with caplog.at_level(logging.WARNING):
            known = prefiller.prefill(prompt)
            unknown = prefiller.prefill(prompt.flip(1))
        assert prefiller.flush()
        stats = prefiller.stats()
    assert warehouse.stores == stores
    for result in (known, unknown):
        assert (result.tokens_loaded, result.store) == (0, StoreState.WEIGHTS_CHANGED)
        assert result.reuse.weights_changed
        assert "weights were changed" in str(result.reuse.failure)
    assert (stats.weights_changed, stats.load_failures) == (2, 0)
    assert [r.message for r in caplog.records if "Make a new WarehousePrefill" in r.message] == [
        "the model's weights were changed: nothing is loaded or stored any more. Make a"
        " new WarehousePrefill with a weights= that names the new ones"
    ]
    with joined(own, warehouse, "new") as fresh:
        assert torch.equal(fresh.prefill(prompt).logits, known.logits)


def test_old_weights_find_nothing_that_other_weights_computed(
    own: Any, model: Any, warehouse: Any, prompt: Any
) -> None:
    with joined(own, warehouse) as prefiller:
        prefiller.prefill(prompt[:, :40])
        take_a_step(own)
        prefiller.prefill(prompt)
    with joined(model, warehouse) as again:
        assert again.prefill(prompt).tokens_loaded == 32


def test_another_connector_with_another_name_serves_the_new_weights(
    own: Any, warehouse: Any, prompt: Any
) -> None:
    with joined(own, warehouse) as prefiller:
        prefiller.prefill(prompt)
    take_a_step(own)
    with joined(own, warehouse, "new") as prefiller:
        computed = prefiller.prefill(prompt)
        assert (computed.tokens_loaded, computed.store) == (0, StoreState.QUEUED)
        assert prefiller.flush()
        reused = prefiller.prefill(prompt)
    assert reused.tokens_loaded == 128
    assert torch.equal(computed.logits, reused.logits)


def test_weights_that_are_put_back_are_not_taken_for_the_old_ones(
    own: Any, warehouse: Any, prompt: Any
) -> None:
    before = copy.deepcopy(own.state_dict())
    with joined(own, warehouse) as prefiller:
        take_a_step(own)
        own.load_state_dict(before)
        assert prefiller.prefill(prompt).store is StoreState.WEIGHTS_CHANGED


def test_what_was_loaded_is_computed_again_when_the_weights_change_after_the_load(
    own: Any, warehouse: Any, prompt: Any
) -> None:
    with joined(own, warehouse) as prefiller:
        prefiller.prefill(prompt)
        assert prefiller.flush()
        prefix = prefiller.load_prefix(prompt)
        assert prefix.reuse.tokens_loaded == 128
        merge_an_adapter(own)
        result = prefiller.complete(prefix)
    assert (result.tokens_loaded, result.store) == (0, StoreState.WEIGHTS_CHANGED)
    with joined(own, warehouse, "new") as fresh:
        assert torch.equal(fresh.prefill(prompt).logits, result.logits)


def test_weights_that_are_the_same_elsewhere_are_the_same(
    own: Any, warehouse: Any, prompt: Any
) -> None:
    with joined(own, warehouse) as prefiller:
        prefiller.prefill(prompt)
        assert prefiller.flush()
        for parameter in own.parameters():
            parameter.data = parameter.data.clone()
        own.generate(prompt[:, :4], max_new_tokens=2, do_sample=False)
        own.eval()
        assert prefiller.prefill(prompt).tokens_loaded == 128
