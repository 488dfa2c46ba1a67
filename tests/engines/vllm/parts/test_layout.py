"""Blocks are the same bytes by address, by torch and through the connector, in all of vLLM's
layouts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvwarehouse as kvw
from kvwarehouse_connectors.vllm.cache_layout import block_layout
from vllm_parts.tensors import Bytes, Caches, caches, laid_out, noise, shapes

BLOCKS = 7
LAYOUTS = list(KVCacheLayout)
DENSE = [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC]
"""Layouts whose blocks vLLM can split into kernels' blocks."""


def made(shape: str, layout: KVCacheLayout, blocks: int = BLOCKS, **options: Any) -> Caches:
    torch.manual_seed(1)
    return caches(shapes()[shape], layout, blocks, **options)


every = pytest.mark.parametrize(
    ("shape", "layout"),
    [pytest.param(shape, layout, id=f"{shape}-{layout.name}") for shape, layout in laid_out()],
)


@every
@pytest.mark.parametrize("kind", ["host", "device"])
def test_gathered_blocks_are_their_bytes_in_the_order_of_memory(
    shape: str, layout: KVCacheLayout, kind: str
) -> None:
    cache = made(shape, layout)
    for group in range(len(cache.config.kv_cache_groups)):
        memory = getattr(cache, kind)(group)
        blocks = [5, 0, 3, 3, BLOCKS - 1]
        rows = np.zeros((len(blocks), memory.block_bytes), np.uint8)
        memory.gather(blocks, rows)
        memory.settle()
        for row, block in zip(rows, blocks, strict=True):
            assert np.array_equal(row, cache.page(block, group))


@every
@pytest.mark.parametrize("kind", ["host", "device"])
def test_scattered_rows_are_the_blocks_and_nothing_else_changes(
    shape: str, layout: KVCacheLayout, kind: str
) -> None:
    cache = made(shape, layout)
    for group in range(len(cache.config.kv_cache_groups)):
        memory = getattr(cache, kind)(group)
        blocks = [4, 1, BLOCKS - 1]
        rows = noise(len(blocks), memory.block_bytes)
        before = cache.memory.copy()
        others = {b: cache.page(b, group) for b in range(BLOCKS) if b not in blocks}
        memory.after_engine()
        memory.scatter(blocks, rows)
        for row, block in zip(rows, blocks, strict=True):
            assert np.array_equal(row, cache.page(block, group))
        for block, page in others.items():
            assert np.array_equal(page, cache.page(block, group))
        assert np.count_nonzero(cache.memory != before) <= rows.size


@pytest.mark.parametrize("layout", DENSE, ids=lambda layout: layout.name)
def test_kernels_blocks_are_put_together_to_the_schedulers(layout: KVCacheLayout) -> None:
    whole = made("three layers", layout)
    split = made("three layers", layout, kernel_tokens=4)
    first = split.by_layer["a"]
    assert first.shape[0] == BLOCKS * 4
    for memory in (split.host(), split.device()):
        rows = np.zeros((BLOCKS, memory.block_bytes), np.uint8)
        memory.gather(range(BLOCKS), rows)
        memory.settle()
        assert memory.block_bytes == whole.host().block_bytes
        for block in range(BLOCKS):
            assert np.array_equal(rows[block], split.page(block))
    assert split.layout().name != whole.layout().name


def test_blocks_of_a_layer_at_once_need_few_pieces() -> None:
    """What is contiguous is moved in one piece, or loads of large models would crawl."""
    assert len(made("three layers", KVCacheLayout.LBHNC).layout().bases) == 3
    assert len(made("three layers", KVCacheLayout.LBNHC).layout().bases) == 3
    assert len(made("three layers", KVCacheLayout.BLHNC).layout().bases) == 3
    assert len(made("three layers", KVCacheLayout.LHBNC).layout().bases) == 3 * 2


@every
def test_layouts_name_does_not_depend_on_how_many_blocks_there_are(
    shape: str, layout: KVCacheLayout
) -> None:
    few, many = made(shape, layout), made(shape, layout, 3 * BLOCKS)
    for group in range(len(few.config.kv_cache_groups)):
        assert few.layout(group).name == many.layout(group).name


def filled(cache: Caches, group: int, block: int) -> Bytes:
    """The page of a block that holds, by logical index, the same in every layout."""
    for place, view in enumerate(cache.views(group)):
        torch.manual_seed(place)
        size = view[block].numel() * view.element_size()
        content = torch.randint(0, 256, (size,), dtype=torch.uint8)
        view[block].copy_(content.view(view.dtype).view(view.shape[1:]))
    return cache.page(block, group)


@pytest.mark.parametrize("shape", shapes())
def test_layouts_of_one_name_put_every_element_in_the_same_place_of_a_page(shape: str) -> None:
    """Pages of one name may be loaded by an engine of another layout: they must mean the same.
    Judged without vLLM's own name of the layout, by which all of them differ."""
    seen: dict[tuple[int, str], Bytes] = {}
    compared = 0
    layouts = [layout for name, layout in laid_out() if name == shape]
    for layout, blocks in itertools.product(layouts, (BLOCKS, 3 * BLOCKS)):
        cache = caches(shapes()[shape], layout, blocks)
        for group, one in enumerate(cache.config.kv_cache_groups):
            name = block_layout(cache.by_layer, one.layer_names, blocks, "").name
            page = filled(cache, group, 2)
            compared += (group, name) in seen
            assert np.array_equal(seen.setdefault((group, name), page), page)
    assert compared >= len(layouts)


def test_layouts_that_order_a_block_differently_have_different_names() -> None:
    names = {
        layout: block_layout(
            made("three layers", layout).by_layer, ["a", "b", "c"], BLOCKS, ""
        ).name
        for layout in LAYOUTS
    }
    assert names[KVCacheLayout.LBHNC] != names[KVCacheLayout.LBNHC]
    assert made("three layers", KVCacheLayout.BLHNC).layout().name != (
        made("three layers", KVCacheLayout.LBHNC).layout().name
    )


def test_layers_that_share_a_tensor_count_once() -> None:
    cache = made("three layers", KVCacheLayout.LBHNC)
    shared = {**cache.by_layer, "d": cache.by_layer["a"]}
    layout = block_layout(shared, ["a", "b", "c", "d", "absent"], BLOCKS, "LBHNC")
    assert layout.block_bytes == cache.layout().block_bytes
    assert layout.name == cache.layout().name


def test_tensor_that_is_not_made_of_the_blocks_is_refused() -> None:
    cache = made("one layer", KVCacheLayout.LBHNC)
    with pytest.raises(kvw.UsageError, match=f"not made of {BLOCKS - 1} blocks") as refused:
        block_layout(cache.by_layer, ["a"], BLOCKS - 1, "LBHNC")
    assert refused.value.code == "unsupported"
    with pytest.raises(kvw.UsageError, match="registered no cache"):
        block_layout(cache.by_layer, ["b"], BLOCKS, "LBHNC")


def test_every_layout_of_vllm_and_every_shape_is_among_the_tests() -> None:
    assert {layout for _, layout in laid_out()} == set(KVCacheLayout)
    assert {shape for shape, _ in laid_out()} == set(shapes())
