"""Which way the pages of a cache's tensors go, and that addresses are proven before pages go by
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvwarehouse as kvw
from kvwarehouse_connectors.core import tensor_memory
from kvwarehouse_connectors.core.device_copies import DeviceCopies
from kvwarehouse_connectors.core.layout import BlockLayout
from kvwarehouse_connectors.core.layout_self_test import addresses_fit
from kvwarehouse_connectors.core.memory import HostMemory
from kvwarehouse_connectors.core.pinned_memory import PinnedMemory
from kvwarehouse_connectors.core.tensor_memory import TensorMemories
from kvwarehouse_connectors.core.torch_stream import TorchStream
from vllm_parts.tensors import Caches, caches, laid_out, shapes

BLOCKS = 5


@pytest.mark.parametrize(
    ("shape", "layout"),
    [pytest.param(shape, layout, id=f"{shape}-{layout.name}") for shape, layout in laid_out()],
)
def test_addresses_of_every_layout_are_proven_and_every_byte_is_as_before(
    shape: str, layout: KVCacheLayout
) -> None:
    cache = caches(shapes()[shape], layout, BLOCKS)
    before = cache.memory.copy()
    for group in range(len(cache.config.kv_cache_groups)):
        assert addresses_fit(cache.layout(group), cache.device(group), BLOCKS)
    assert np.array_equal(before, cache.memory)


def shifted(layout: BlockLayout) -> BlockLayout:
    return replace(layout, bases=layout.bases + np.uint64(2))


def twice(layout: BlockLayout) -> BlockLayout:
    bases = layout.bases.copy()
    bases[-1] = bases[0]
    return replace(layout, bases=bases)


def turned(layout: BlockLayout) -> BlockLayout:
    return replace(layout, bases=layout.bases[::-1].copy())


def stretched(layout: BlockLayout) -> BlockLayout:
    return replace(layout, strides=layout.strides * 2)


def shorter(layout: BlockLayout) -> BlockLayout:
    return replace(layout, piece_bytes=layout.piece_bytes - np.uint64(2))


WRONG = [shifted, twice, turned, stretched, shorter]


@pytest.fixture
def cache() -> Caches:
    torch.manual_seed(1)
    return caches(shapes()["three layers"], KVCacheLayout.LBHNC, BLOCKS)


@pytest.mark.parametrize("wrong", WRONG)
def test_addresses_that_are_others_are_found_out(
    cache: Caches, wrong: Callable[[BlockLayout], BlockLayout]
) -> None:
    before = cache.memory.copy()
    assert not addresses_fit(wrong(cache.layout()), cache.device(), BLOCKS)
    assert np.array_equal(before, cache.memory)


# --- the choice; on a device of torch's that is no CPU, with no memory behind its tensors


class Ways:
    """Chooses for a cache that seems to be on a device."""

    def __init__(self, cache: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = cache
        self.fallbacks: list[None] = []
        self.views = [torch.empty_like(view, device="meta") for view in cache.views()]
        monkeypatch.setattr(tensor_memory, "DeviceMemory", lambda views: cache.device())

    def choose(self, layout: BlockLayout | None = None, wish: str = "auto") -> Any:
        self.made = TensorMemories(wish, lambda: self.fallbacks.append(None))
        return self.made.memory(layout or self.cache.layout(), self.views, BLOCKS)


@pytest.fixture
def ways(cache: Caches, monkeypatch: pytest.MonkeyPatch) -> Ways:
    return Ways(cache, monkeypatch)


def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tensor_memory,
        "device_copies",
        lambda stream, address, wish, on_fallback: DeviceCopies(0, on_fallback),
    )


def test_cache_in_host_memory_stays_with_the_host(cache: Caches, ways: Ways) -> None:
    ways.views = cache.views()
    assert type(ways.choose()) is HostMemory
    assert not ways.fallbacks


@pytest.mark.usefixtures("cuda_driver")
def test_cache_on_a_gpu_goes_straight_where_its_addresses_fit(
    ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_gpu(monkeypatch)
    assert type(ways.choose()) is PinnedMemory
    assert not ways.fallbacks


def test_cache_on_a_gpu_that_takes_no_kernels_goes_through_the_buffer(
    ways: Ways, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(ordinal: int) -> Any:
        raise kvw.StorageError("the device takes no kernels", code="gpu_error")

    a_gpu(monkeypatch)
    monkeypatch.setattr(kvw.gpu, "DeviceGather", refused)
    assert not isinstance(ways.choose(), PinnedMemory)
    assert not isinstance(ways.made.memory(ways.cache.layout(), ways.views, BLOCKS), PinnedMemory)
    assert (len(ways.fallbacks), ways.made.device_address) == (1, 0)
    assert "takes no kernels" in caplog.text


@pytest.mark.parametrize("wrong", WRONG)
def test_cache_whose_strides_do_not_say_where_it_is_goes_through_the_buffer(
    ways: Ways,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wrong: Callable[[BlockLayout], BlockLayout],
) -> None:
    a_gpu(monkeypatch)
    assert not isinstance(ways.choose(wrong(ways.cache.layout())), PinnedMemory)
    assert not isinstance(ways.made.memory(ways.cache.layout(), ways.views, BLOCKS), PinnedMemory)
    assert len(ways.fallbacks) == 1
    assert "is not where its strides say" in caplog.text


def test_device_of_another_kind_goes_through_the_buffer_and_is_said_once(
    ways: Ways, caplog: pytest.LogCaptureFixture
) -> None:
    ways.choose()
    ways.made.memory(ways.cache.layout(), ways.views, BLOCKS)
    assert len(ways.fallbacks) == 1
    assert [("type meta" in line) for line in caplog.messages] == [True]


def test_buffer_that_was_wished_is_no_fallback(
    ways: Ways, caplog: pytest.LogCaptureFixture
) -> None:
    assert not isinstance(ways.choose(wish="off"), PinnedMemory)
    assert not ways.fallbacks
    assert not caplog.messages


def test_torch_for_rocm_is_told_from_torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both call their devices cuda."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "ROCm" in TorchStream(torch.device("cuda")).problem
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert TorchStream(torch.device("cuda")).problem == ""
    assert "xpu" in TorchStream(torch.device("xpu")).problem
