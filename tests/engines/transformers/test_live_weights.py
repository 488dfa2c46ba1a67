"""Weights that are changed in place, in every way that engines and training have, are seen by a
sample of what is in memory; and whatever types and layouts they have, they can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvwarehouse as kvw

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvwarehouse_connectors.core.live_weights import LiveWeights

LAYERS = 64
WIDTH = 48  # a matrix has more elements than are sampled of it


class Layer(torch.nn.Module):
    """As many kinds as layers: with an even stride the sample would be of one kind."""

    def __init__(self) -> None:
        super().__init__()
        for kind in "abcdefgh":
            setattr(self, kind, torch.nn.Linear(WIDTH, WIDTH, bias=False))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(100, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, 100, bias=False)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return Model().to(torch.bfloat16)


def train(model: Any) -> None:
    """A step as small as is usual: in bfloat16 most elements stay as they are."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            master = parameter.float()
            master += 1e-5 * torch.randn(master.shape, generator=generator).sign()
            parameter.copy_(master)


def write_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def put_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def load_state(model: Any) -> None:
    torch.manual_seed(7)
    model.load_state_dict(Model().state_dict())


def replace_parameters(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.detach() * 1.5)


def merge_an_adapter_of_one_kind(model: Any) -> None:
    for layer in model.layers:
        layer.f.weight.data += 0.01


def quantize_in_place(model: Any) -> None:
    for layer in model.layers:
        for kind in "abcdefgh":
            module = getattr(layer, kind)
            whole = (module.weight.detach().float() * 100).to(torch.int8)
            module.weight = torch.nn.Parameter(whole, requires_grad=False)


def replace_modules(model: Any) -> None:
    for layer in model.layers:
        layer.c = torch.nn.Identity()


def write_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.mul_(1.5)


@pytest.mark.parametrize(
    "change",
    [
        train,
        write_data,
        put_data,
        load_state,
        replace_parameters,
        merge_an_adapter_of_one_kind,
        quantize_in_place,
        replace_modules,
        write_in_inference_mode,
    ],
)
def test_digest_differs_when_the_weights_were_changed(
    model: Any, change: Callable[[Any], None]
) -> None:
    weights = LiveWeights(model)
    before = weights.digest()
    change(model)
    assert weights.digest() != before


def test_digest_is_the_same_when_the_weights_are(model: Any) -> None:
    weights = LiveWeights(model)
    before = weights.digest()
    with torch.inference_mode():
        model.embed_tokens(torch.tensor([1]))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # as of another device: other addresses
    assert weights.digest() == before == LiveWeights(model).digest()


def test_digest_comes_back_when_the_weights_do(model: Any) -> None:
    weights = LiveWeights(model)
    before, kept = weights.digest(), {k: v.clone() for k, v in model.state_dict().items()}
    write_data(model)
    changed = weights.digest()
    model.load_state_dict(kept)
    assert changed != before == weights.digest()


@pytest.mark.parametrize("name", ["embed_tokens.weight", "head.weight", "layers.0.a.weight"])
@pytest.mark.parametrize("element", [0, -1])
def test_ends_of_the_first_and_last_tensors_are_in_the_sample(
    model: Any, name: str, element: int
) -> None:
    weights = LiveWeights(model)
    before = weights.digest()
    model.get_parameter(name).data.view(-1)[element] += 1
    assert weights.digest() != before


def buffers_of(*tensors: Any) -> Any:
    module = torch.nn.Module()
    for at, tensor in enumerate(tensors):
        module.register_buffer(f"b{at}", tensor)
    return module


@pytest.mark.parametrize(
    "dtype",
    ["float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool", "int32", "float64", "complex64"],
)
def test_every_type_is_read_and_its_change_is_seen(dtype: str) -> None:
    zeros = torch.zeros(300, 300).to(getattr(torch, dtype))
    module = buffers_of(zeros)
    weights = LiveWeights(module)
    before = weights.digest()
    module.b0.copy_(torch.ones(300, 300))
    assert weights.digest() != before


class LargestOutput(TorchDispatchMode):
    """Bytes of the largest tensor that an operation made; a view makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage.data_ptr() not in known:
                self.size_bytes = max(self.size_bytes, storage.nbytes())
        return result


def test_no_copy_is_larger_than_the_sample_whatever_the_layout() -> None:
    large = torch.arange(3_000_000, dtype=torch.float64).view(3000, 1000)
    module = buffers_of(large, large.clone().t(), large.clone()[::2, 1:])
    weights = LiveWeights(module)
    with LargestOutput() as largest:
        before = weights.digest()
    assert 0 < largest.size_bytes <= 512 * 1024
    module.b2.add_(1)
    assert weights.digest() != before
    # The same elements in another layout are the same weights.
    module.b1 = module.b1.contiguous()
    module.b2.sub_(1)
    assert weights.digest() == before


def test_tensor_in_two_places_is_read_wherever_it_lies(model: Any) -> None:
    model.head.weight = model.embed_tokens.weight
    weights = LiveWeights(model)
    before = weights.digest()
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    assert weights.digest() == before, "untied, and still the same"
    model.embed_tokens.weight.data.add_(1)
    assert weights.digest() != before


def test_what_cannot_be_read_is_left_out() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    sparse = torch.eye(4).to_sparse()
    module = buffers_of(torch.empty(0), torch.empty(4, device="meta"), quantized, sparse)
    with pytest.raises(kvw.UsageError, match="no weights of Module are in memory") as refused:
        LiveWeights(module)
    assert refused.value.code == "no_weights"
    module.register_buffer("good", torch.zeros(4))
    weights = LiveWeights(module)
    before = weights.digest()
    module.good.add_(1)
    assert weights.digest() != before


def test_weights_that_left_memory_are_not_the_same() -> None:
    module = buffers_of(torch.ones(4), torch.ones(5))
    weights = LiveWeights(module)
    before = weights.digest()
    module.b0 = module.b0.to("meta")
    assert weights.digest() != before


def test_wrapper_is_read_by_its_parts() -> None:
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    module = buffers_of(two(torch.ones(4), torch.zeros(4)))
    weights = LiveWeights(module)
    before = weights.digest()
    module.b0.b.add_(1)
    assert weights.digest() != before


def test_census_differs_when_torch_counted_a_write_or_a_tensor_was_added(model: Any) -> None:
    with torch.inference_mode():
        model.register_buffer("made_in_inference", torch.zeros(4))
    weights = LiveWeights(model)
    before = weights.census()
    model.layers[5].b.weight.detach()[7, 7] += 1  # not in the sample
    written = weights.census()
    write_data(model)
    assert before != written == weights.census()
    model.layers[5].b.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(4)))
    assert weights.census() != written


def test_sample_is_the_same_until_weights_change_wherever_they_are_put(model: Any) -> None:
    weights = LiveWeights(model, 1000)
    before = weights.sample()
    assert before.ready
    for parameter in list(model.parameters()):
        kept = parameter.data
        parameter.data = kept.clone()
        assert weights.sample().same_as(before), "the same weights at another address"
        parameter.data.add_(1)
        assert not weights.sample().same_as(before)
        parameter.data = kept
        assert weights.sample().same_as(before)


def test_sample_sees_a_parameter_that_was_replaced_and_one_that_is_gone() -> None:
    layer = torch.nn.Linear(64, 64)
    weights = LiveWeights(layer)
    before = weights.sample()
    kept, layer.weight = layer.weight, torch.nn.Parameter(torch.zeros(64, 64))
    assert not weights.sample().same_as(before)
    layer.weight = kept
    assert weights.sample().same_as(before)
    layer.register_parameter("weight", None)
    assert not weights.sample().same_as(before)
