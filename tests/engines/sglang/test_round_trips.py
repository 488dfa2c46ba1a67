"""What SGLang's controller backs up, another controller prefetches, byte for byte, in every layout
of its host pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvwarehouse_bench.harness.serving import Serving
from sglang_rig.engine import prompt
from sglang_rig.pools import PAGE, Shape

MHA = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
MLA = ("layer_first", "page_first", "page_first_direct")
SHAPES = [Shape(layout) for layout in MHA] + [Shape(layout, "mla") for layout in MLA]
OTHERS = [
    Shape("page_first", dtype=torch.float16),
    Shape("layer_first", dtype=torch.float8_e4m3fn),
    Shape("page_head", heads=1),
    Shape("page_first_direct", heads=8, head_dim=16),
]


@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS], ids=str)
def test_a_prompt_comes_back_byte_for_byte_after_a_flush(
    start: Any, shared: Serving, shape: Shape, seed: int
) -> None:
    first, tokens = start(shared.address, shape), prompt(seed, 5)
    stored, pages = first.store(tokens, seed)
    assert stored == 5 * PAGE
    assert len({*pages}) == 5, "pages are told apart by their bytes"
    for engine in (first, start(shared.address, shape)):
        back = engine.prefetch([*tokens, 1, 2, 3])
        assert (back.hit, back.tokens) == (5 * PAGE, 5 * PAGE)
        assert back.pages == pages


def test_the_stored_prefix_of_a_longer_prompt_is_found(
    start: Any, shared: Serving, seed: int
) -> None:
    engine, tokens = start(shared.address), prompt(seed, 8)
    _, pages = engine.store(tokens[: 5 * PAGE], seed)
    assert engine.prefetch(tokens).pages == pages
    assert engine.prefetch(prompt(seed + 1, 8)).hit == 0
    changed = [*tokens[: 3 * PAGE], 7, *tokens[3 * PAGE + 1 :]]
    assert engine.prefetch(changed).pages == pages[:3]


def test_more_pages_than_sglang_moves_at_once_come_back(
    start: Any, shared: Serving, seed: int
) -> None:
    """It asks for 128 pages at a time."""
    shape = Shape("page_first_direct", heads=1, head_dim=16)
    engine, tokens = start(shared.address, shape), prompt(seed, 30)
    for first in (0, 10, 20):
        part = tokens[first * PAGE : (first + 10) * PAGE]
        assert engine.store(part, seed + first, before=tokens[: first * PAGE])[0] == 10 * PAGE
    assert engine.prefetch(tokens, before=[]).tokens == 30 * PAGE


def test_a_prompt_that_goes_on_is_stored_and_found_behind_its_begin(
    start: Any, shared: Serving, seed: int
) -> None:
    """With the keys before: hicache_storage_pass_prefix_keys."""
    tokens = prompt(seed, 6)
    begin, rest = tokens[: 2 * PAGE], tokens[2 * PAGE :]
    engine = start(shared.address)
    _, first = engine.store(begin, seed, before=[])
    _, second = engine.store(rest, seed + 1, before=begin)
    assert engine.prefetch(tokens, before=[]).pages == first + second
    assert engine.prefetch(rest, before=begin).pages == second


def test_what_one_engine_keeps_as_chains_is_not_mixed_with_pages_that_stand_alone(
    start: Any, shared: Serving, seed: int
) -> None:
    engine, tokens = start(shared.address), prompt(seed, 4)
    _, chained = engine.store(tokens, seed, before=[])
    _, alone = engine.store(tokens, seed + 1)
    assert chained != alone
    assert engine.prefetch(tokens, before=[]).pages == chained
    assert engine.prefetch(tokens).pages == alone


@pytest.mark.parametrize("shape", [Shape(layout) for layout in MHA[:4]] + SHAPES[5:], ids=str)
def test_the_interface_with_copies_keeps_the_same_pages(
    start: Any, shared: Serving, shape: Shape, seed: int
) -> None:
    by_address, tokens = start(shared.address, shape), prompt(seed, 5)
    copying = start(shared.address, shape, interface_v1=0)
    assert copying.controller.page_get_func.__name__ == "_generic_page_get"
    stored, pages = copying.store(tokens, seed)
    assert stored == 5 * PAGE
    assert copying.prefetch(tokens).pages == pages
    assert by_address.prefetch(tokens).pages == pages
    other = prompt(seed + 1, 5)
    _, pages = by_address.store(other, seed + 1)
    assert copying.prefetch(other).pages == pages


def test_sglangs_metrics_have_each_calls_pages(start: Any, shared: Serving, seed: int) -> None:
    engine, tokens = start(shared.address), prompt(seed, 5)
    engine.store(tokens, seed)
    engine.prefetch(tokens)
    stats = engine.controller.storage_backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([5], [5])
    assert len(stats.prefetch_bandwidth) == len(stats.backup_bandwidth) == 1
    assert engine.controller.storage_backend.get_stats().backup_pgs == []
    totals = engine.storage.totals()
    assert (totals["stored_pages"], totals["loaded_pages"], totals["hit_pages"]) == (5, 5, 5)


def test_clear_removes_this_engines_pages_and_no_others(
    start: Any, shared: Serving, seed: int
) -> None:
    mine, tokens = start(shared.address), prompt(seed, 4)
    theirs = start(shared.address, model="another", **{"kvwarehouse.weights": "other"})
    mine.store(tokens, seed)
    mine.store(tokens, seed, before=[])
    theirs.store(tokens, seed)
    mine.controller.storage_backend.clear()
    assert mine.prefetch(tokens).hit == 0
    assert mine.prefetch(tokens, before=[]).hit == 0
    assert theirs.prefetch(tokens).tokens == 4 * PAGE
