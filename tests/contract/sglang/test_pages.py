"""Pages of a host pool keep their bytes in the warehouse, whatever the layout, and only those who
mean the same bytes find them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.sglang.counts import Counts
from kvwarehouse_connectors.sglang.engine_info import RankInfo
from kvwarehouse_connectors.sglang.keys import Span
from testkit.host_pools import ModelPool, ModelTensor

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
PAGES = [2, 5, 3, 9]


def names(*parts: Any) -> list[str]:
    return [hashlib.sha256(repr(part).encode()).hexdigest() for part in parts]


def keys(seed: int, count: int = len(PAGES)) -> list[str]:
    return names(*((seed, page) for page in range(count)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_comes_back_bit_for_bit_into_other_slots(
    attach: Any, shared: Serving, layout: str, seed: int
) -> None:
    pool = ModelPool(layout)
    warehouse = attach(pool, shared.address)
    pool.fill(seed)
    before, span = pool.content(PAGES), Span.of(keys(seed))
    assert warehouse.store(span, pool.slots(PAGES)) == [True] * 4
    pool.array[...] = 0
    assert warehouse.there(span).all()
    assert warehouse.load(span, pool.slots([8, 1, 0, 4])) == 4
    assert pool.content([8, 1, 0, 4]) == before
    others = [page for page in range(pool.page_num) if page not in (8, 1, 0, 4)]
    assert not any(pool.content(others)), "slots of other pages were written"


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_a_page_of_a_latent_cache_is_stored_by_one_rank_and_read_by_all(
    attach: Any, shared: Serving, layout: str, seed: int
) -> None:
    writer, reader = ModelPool(layout, latent=True), ModelPool(layout, latent=True)
    ranks = [RankInfo(tp_rank=rank, tp_size=2, latent=True) for rank in range(2)]
    first = attach(writer, shared.address, ranks=ranks[0])
    second = attach(reader, shared.address, ranks=ranks[1])
    writer.fill(seed)
    span = Span.of(keys(seed))
    assert all(first.store(span, writer.slots(PAGES)))
    assert second.load(span, reader.slots(PAGES)) == 4
    assert reader.content(PAGES) == writer.content(PAGES)


def test_a_page_is_there_when_all_ranks_have_stored_their_part(
    attach: Any, shared: Serving, seed: int
) -> None:
    pools = [ModelPool("page_first"), ModelPool("page_first")]
    ranks = [
        attach(pool, shared.address, ranks=RankInfo(tp_rank=rank, tp_size=2))
        for rank, pool in enumerate(pools)
    ]
    for rank, pool in enumerate(pools):
        pool.fill(seed + rank)
    span = Span.of(keys(seed))
    ranks[0].store(span, pools[0].slots(PAGES))
    assert not ranks[0].there(span).any()
    assert ranks[0].load(span, pools[0].slots([0, 1, 4, 6])) == 0
    ranks[1].store(span, pools[1].slots(PAGES))
    for rank, pool in zip(ranks, pools, strict=True):
        assert rank.there(span).all()
        assert rank.load(span, pool.slots([0, 1, 4, 6])) == 4
        assert pool.content([0, 1, 4, 6]) == pool.content(PAGES)


def test_pages_cut_by_heads_are_read_by_ranks_of_another_tp_size_and_back(
    attach: Any, shared: Serving, seed: int
) -> None:
    whole, span = ModelPool("page_head", heads=4), Span.of(keys(seed))
    one = attach(whole, shared.address, ranks=RankInfo(tp_lcm_size=2))
    halves = [ModelPool("page_head", heads=2) for _ in range(2)]
    two = [
        attach(pool, shared.address, ranks=RankInfo(tp_rank=rank, tp_size=2))
        for rank, pool in enumerate(halves)
    ]
    whole.fill(seed)
    assert all(one.store(span, whole.slots(PAGES)))
    for rank, (warehouse, half) in enumerate(zip(two, halves, strict=True)):
        assert warehouse.load(span, half.slots(PAGES)) == 4
        heads = whole.array[:, PAGES, 2 * rank : 2 * rank + 2]
        assert (half.array[:, PAGES] == heads).all()
    other = Span.of(keys(seed + 1))
    for warehouse, half in zip(two, halves, strict=True):
        half.fill(seed + 7 + two.index(warehouse))
        assert all(warehouse.store(other, half.slots(PAGES)))
    assert one.load(other, whole.slots([0, 1, 4, 6])) == 4
    for rank, half in enumerate(halves):
        heads = whole.array[:, [0, 1, 4, 6], 2 * rank : 2 * rank + 2]
        assert (heads == half.array[:, PAGES]).all()


def test_without_a_common_cut_ranks_of_another_tp_size_find_nothing(
    attach: Any, shared: Serving, seed: int
) -> None:
    whole, half, span = ModelPool("page_head"), ModelPool("page_head", heads=2), Span.of(keys(seed))
    one = attach(whole, shared.address)
    two = attach(half, shared.address, ranks=RankInfo(tp_size=2))
    whole.fill(seed)
    assert all(one.store(span, whole.slots(PAGES)))
    assert not two.there(span).any()
    assert two.load(span, half.slots(PAGES)) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"weights": "v"},
        {"salt": "another"},
        {"ranks": RankInfo(pp_size=2)},
        {"pool": ModelPool("page_first_direct")},
        {"pool": ModelPool("page_first", layers=2)},
        {"pool": ModelPool("page_first", heads=2, head_dim=64)},
        {"pool": ModelPool("page_first", page_size=2, layers=6)},
        {"pool": ModelPool("page_first", latent=True)},
    ],
    ids=(
        *("weights", "salt", "stages", "layout", "layers", "heads", "page size"),
        "latent attention",
    ),
)
def test_the_same_keys_of_something_else_are_a_miss(
    attach: Any, shared: Serving, other: dict[str, Any], seed: int
) -> None:
    pool, span = ModelPool("page_first"), Span.of(keys(seed))
    mine = attach(pool, shared.address, salt="s")
    pool.fill(seed)
    assert all(mine.store(span, pool.slots(PAGES)))
    theirs = other.pop("pool", None) or ModelPool("page_first")
    stranger = attach(theirs, shared.address, **{"salt": "s", **other})
    assert not stranger.there(span).any()
    assert stranger.load(span, theirs.slots(PAGES)) == 0
    assert not any(theirs.content(PAGES))


def test_a_load_ends_at_the_first_page_that_is_not_there(
    attach: Any, shared: Serving, seed: int, counts: Counts
) -> None:
    pool, named = ModelPool("page_first"), keys(seed)
    warehouse = attach(pool, shared.address)
    pool.fill(seed)
    warehouse.store(Span.of([named[0], named[1], named[3]]), pool.slots([2, 5, 9]))
    assert warehouse.there(Span.of(named)).tolist() == [True, True, False, True]
    assert warehouse.load(Span.of(named), pool.slots(PAGES)) == 2
    assert counts.totals()["missed_pages"] == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_pages_and_pages_in_place_are_the_same_pages(
    attach: Any, shared: Serving, layout: str, seed: int
) -> None:
    pool, span = ModelPool(layout), Span.of(keys(seed))
    warehouse = attach(pool, shared.address)
    pool.fill(seed)
    flat = [pool.get_data_page(page * pool.page_size) for page in PAGES]
    assert warehouse.store_flat(span, flat) == [True] * 4
    pages = [pool.get_dummy_flat_data_page() for _ in PAGES]
    assert warehouse.load_flat(span, pages) == 4
    assert b"".join(page.array.tobytes() for page in pages) == pool.content(PAGES)
    assert warehouse.load(span, pool.slots([0, 1, 4, 6])) == 4
    assert pool.content([0, 1, 4, 6]) == pool.content(PAGES)


def test_flat_pages_of_another_size_are_not_stored_nor_filled(
    attach: Any, shared: Serving, seed: int
) -> None:
    pool, span = ModelPool("page_first"), Span.of(keys(seed, 1))
    warehouse = attach(pool, shared.address)
    short = ModelTensor(np.zeros(8, np.uint16))
    assert warehouse.store_flat(span, [short]) == [False]
    assert warehouse.load_flat(span, [short]) == 0
    assert warehouse.store_flat(span, [None]) == [False]


@pytest.mark.parametrize(
    "slots", [[1, 2, 3, 4], [0, 2, 1, 3], [0, 1, 2], [-4, -3, -2, -1], [48, 49, 50, 51]]
)
def test_slots_that_are_no_whole_page_of_the_pool_are_refused(
    attach: Any, shared: Serving, slots: list[int], seed: int
) -> None:
    pool, span = ModelPool("page_first"), Span.of(keys(seed, 1))
    warehouse = attach(pool, shared.address)
    assert warehouse.store(span, np.array(slots)) == [False]
    assert warehouse.load(span, np.array(slots)) == 0
    assert not warehouse.there(span).any()


def test_a_reader_stores_nothing_and_a_writer_loads_nothing(
    attach: Any, shared: Serving, seed: int, counts: Counts
) -> None:
    pool, span = ModelPool("page_first"), Span.of(keys(seed))
    reader = attach(pool, shared.address, mode="read_only")
    writer = attach(pool, shared.address, mode="write_only")
    assert reader.store(span, pool.slots(PAGES)) == [False] * 4
    assert counts.totals()["dropped.read_only"] == 4
    assert all(writer.store(span, pool.slots(PAGES)))
    assert not writer.there(span).any()
    assert writer.load(span, pool.slots(PAGES)) == 0
    assert reader.there(span).all()


def test_nothing_is_asked_for_no_pages(attach: Any, shared: Serving) -> None:
    pool = ModelPool("page_first")
    warehouse = attach(pool, shared.address)
    assert warehouse.store(Span.of([]), pool.slots([])) == []
    assert warehouse.load(Span.of([]), pool.slots([])) == 0
    assert warehouse.there(Span.of([])).tolist() == []
