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
KEYS = pytest.mark.parametrize("keys", [False, True], ids=["no keys before", "keys before"])
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
        ahead = [tokens[: first * PAGE]] if first else []
        assert engine.store(part, seed + first, ahead)[0] == 10 * PAGE
    assert engine.prefetch(tokens).tokens == 30 * PAGE


@KEYS
def test_what_is_stored_behind_a_prefix_that_the_engine_has_is_loaded(
    start: Any, shared: Serving, keys: bool, seed: int
) -> None:
    """Incident: for a prefetch SGLang passes the keys before the last node that it has, without
    those of the node itself. Pages were looked up as hits at the wrong place of a chain, and none
    was loaded behind a prefix that was in GPU or host memory."""
    tokens = prompt(seed, 6)
    engine = start(shared.address)
    engine.passes_prefix_keys = keys
    begin, rest = tokens[: 2 * PAGE], tokens[2 * PAGE :]
    _, first = engine.store(begin, seed)
    _, second = engine.store(rest, seed + 1, [begin])
    pages = first + second
    assert engine.prefetch(tokens).pages == pages
    for cuts in ([1], [2], [5], [1, 2], [1, 3, 4]):
        edges = list(zip([0, *cuts], cuts, strict=False))
        ahead = [tokens[left * PAGE : right * PAGE] for left, right in edges]
        found = engine.prefetch(tokens[cuts[-1] * PAGE :], ahead)
        assert found.pages == pages[cuts[-1] :], cuts
    assert "missed_pages" not in engine.storage.totals()


@KEYS
def test_pages_of_a_decode_offload_are_loaded(
    start: Any, shared: Serving, keys: bool, seed: int
) -> None:
    """Incident: a decode offload passes no keys before its pages, so that engines which pass them
    never asked for what it had stored."""
    tokens = prompt(seed, 4)
    begin, rest = tokens[: 2 * PAGE], tokens[2 * PAGE :]
    engine, decode = start(shared.address), start(shared.address)
    engine.passes_prefix_keys = keys
    _, first = engine.store(begin, seed)
    _, second = decode.store(rest, seed + 1, [begin])
    assert engine.prefetch(rest, [begin]).pages == second
    assert engine.prefetch(tokens).pages == first + second


def test_engines_that_pass_the_keys_before_share_with_those_that_do_not(
    start: Any, shared: Serving, seed: int
) -> None:
    tokens, others = prompt(seed, 4), prompt(seed + 1, 4)
    passing, other = start(shared.address), start(shared.address)
    passing.passes_prefix_keys = True
    _, pages = passing.store(tokens, seed)
    assert other.prefetch(tokens).pages == pages
    _, pages = other.store(others, seed + 1)
    assert passing.prefetch(others).pages == pages


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
    theirs.store(tokens, seed)
    mine.controller.storage_backend.clear()
    assert mine.prefetch(tokens).hit == 0
    assert theirs.prefetch(tokens).tokens == 4 * PAGE
