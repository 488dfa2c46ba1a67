"""Whatever becomes of the daemon or of a page, the connector has a miss or a page that was not
stored, and counts it; what it says it loaded is what was stored."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.sglang.counts import Counts
from kvwarehouse_connectors.sglang.engine_info import RankInfo
from kvwarehouse_connectors.sglang.keys import Span, page_key
from testkit.damage import find_one
from testkit.host_pools import ModelPool

PAGES = [2, 5, 3, 9]


def span_of(seed: int, count: int = 4) -> Span:
    return Span([page_key(f"{seed}/{page}") for page in range(count)])


def test_without_a_daemon_nothing_is_there_and_nothing_is_stored(
    attach: Any, tmp_path: Path, counts: Counts, seed: int
) -> None:
    pool, span = ModelPool("page_first"), span_of(seed)
    warehouse = attach(pool, f"unix://{tmp_path}/none.sock")
    assert warehouse.store(span, pool.slots(PAGES)) == [False] * 4
    assert not warehouse.there(span).any()
    assert warehouse.load(span, pool.slots(PAGES)) == 0
    assert counts.totals()["dropped.unreachable"] == 4
    assert counts.totals()["missed.unreachable"] == 4


def test_a_daemon_that_comes_later_is_found(attach: Any, serving: Serving, seed: int) -> None:
    serving.kill()
    pool, span = ModelPool("page_first"), span_of(seed)
    warehouse = attach(pool, serving.address)
    assert not any(warehouse.store(span, pool.slots(PAGES)))
    serving.start()
    eventually(lambda: all(warehouse.store(span, pool.slots(PAGES))), "a store at the new daemon")
    assert warehouse.there(span).all()


def test_pages_outlive_a_killed_daemon_and_are_stored_at_the_next(
    attach: Any, serving: Serving, seed: int
) -> None:
    pool, span, more = ModelPool("page_first"), span_of(seed), span_of(seed + 1)
    warehouse = attach(pool, serving.address)
    pool.fill(seed)
    before = pool.content(PAGES)
    assert all(warehouse.store(span, pool.slots(PAGES)))
    serving.kill()
    eventually(lambda: not any(warehouse.store(more, pool.slots(PAGES))), "a store that is refused")
    pool.array[...] = 0
    # Its memory is mapped still: either all of a page comes, or it is a miss.
    filled = warehouse.load(span, pool.slots(PAGES))
    assert pool.content(PAGES[:filled]) == before[: len(before) * filled // 4]
    serving.start()
    eventually(lambda: warehouse.load(span, pool.slots(PAGES)) == 4, "a load from the next daemon")
    assert pool.content(PAGES) == before
    eventually(lambda: all(warehouse.store(more, pool.slots(PAGES))), "a store at the next daemon")


def test_a_stopped_daemon_serves_what_is_in_dram_and_is_not_waited_for(
    attach: Any, silence_counts: Any, serving: Serving, seed: int, counts: Counts
) -> None:
    pool, near, far = ModelPool("page_first"), span_of(seed), span_of(seed + 1)
    # Bounds far beyond the test's own: who waits for them fails.
    warehouse = attach(pool, serving.address, load_timeout_s=500.0, store_timeout_s=500.0)
    pool.fill(seed)
    before = pool.content(PAGES)
    assert all(warehouse.store(far, pool.slots(PAGES)))
    with serving.connect() as client:
        assert client.flush().pending == 0
        client.evict(None, 100)
    assert all(warehouse.store(near, pool.slots(PAGES)))
    assert warehouse.there(far).all()
    silence_counts()
    serving.pause()
    try:
        assert warehouse.load(far, pool.slots(PAGES)) == 0
        eventually(
            lambda: not warehouse.there(far).any(), "that the daemon is known to stand still"
        )
        pool.array[...] = 0
        assert warehouse.there(near).all()
        assert warehouse.load(near, pool.slots(PAGES)) == 4
        assert pool.content(PAGES) == before
        assert warehouse.load(far, pool.slots(PAGES)) == 0
        assert warehouse.store(span_of(seed + 2), pool.slots(PAGES)) == [False] * 4
        assert counts.totals()["dropped.unreachable"] == 4
    finally:
        serving.resume()
    eventually(lambda: warehouse.there(far).all(), "that the daemon is known to beat again")
    pool.array[...] = 0
    assert warehouse.load(far, pool.slots(PAGES)) == 4
    assert pool.content(PAGES) == before


def test_a_warehouse_that_was_emptied_beneath_is_registered_at_anew(
    attach: Any, serving: Serving, seed: int
) -> None:
    pool, span = ModelPool("page_first"), span_of(seed)
    warehouse = attach(pool, serving.address)
    pool.fill(seed)
    assert all(warehouse.store(span, pool.slots(PAGES)))
    serving.kill()
    serving.lose_arena()
    for file in [*serving.nvme_dir.rglob("*")]:
        if file.is_file():
            file.unlink()
    serving.start()
    eventually(
        lambda: all(warehouse.store(span, pool.slots(PAGES))), "a store at the empty warehouse"
    )
    before = pool.content(PAGES)
    assert warehouse.load(span, pool.slots([0, 1, 4, 6])) == 4
    assert pool.content([0, 1, 4, 6]) == before


def test_a_damaged_page_is_a_miss_and_is_stored_again_good(
    attach: Any, shared: Serving, seed: int, counts: Counts
) -> None:
    """Where there is no other copy on NVMe."""
    pool, span = ModelPool("page_first", head_dim=256), span_of(seed)
    warehouse = attach(pool, shared.address)
    pool.fill(seed)
    before = pool.content(PAGES)
    assert all(warehouse.store(span, pool.slots(PAGES)))
    third = np.frombuffer(pool.content([3]), np.uint8)
    find_one([shared.arena_dir / "arena"], third).flip(2, at=100)
    assert warehouse.load(span, pool.slots([0, 1, 4, 6])) == 2
    assert pool.content([0, 1]) == before[: len(before) // 2]
    assert counts.totals()["missed_pages"] == 2
    eventually(lambda: not warehouse.there(span).all(), "the page taken out")
    eventually(
        lambda: (
            all(warehouse.store(span, pool.slots(PAGES)))
            and warehouse.load(span, pool.slots([0, 1, 4, 6])) == 4
        ),
        "the page stored again",
    )
    assert pool.content([0, 1, 4, 6]) == before


def test_evicted_pages_are_misses(attach: Any, serving: Serving, seed: int) -> None:
    pool, span = ModelPool("page_first"), span_of(seed)
    warehouse = attach(pool, serving.address)
    pool.fill(seed)
    assert all(warehouse.store(span, pool.slots(PAGES)))
    with serving.connect() as client:
        client.clear(all=True)
    assert not warehouse.there(span).any()
    assert warehouse.load(span, pool.slots(PAGES)) == 0


def test_what_the_warehouse_drops_is_reported_as_not_stored(
    attach: Any, serving: Serving, seed: int, counts: Counts
) -> None:
    pool, span = ModelPool("page_first"), span_of(seed)
    warehouse = attach(pool, serving.address)
    assert all(warehouse.store(Span(span.keys[1:3]), pool.slots([5, 3])))
    with serving.connect() as client:
        client.drain()
    assert warehouse.store(span, pool.slots(PAGES)) == [False, True, True, False]
    assert counts.totals()["dropped.draining"] == 4
    assert counts.totals()["stored_pages"] == 2


def test_pages_that_are_dropped_count_once_for_all_of_their_parts(
    attach: Any, serving: Serving, seed: int, counts: Counts
) -> None:
    """Incident: with tp_lcm_size a full daemon seemed to drop as many times more as a rank has
    parts."""
    pool, span = ModelPool("page_head", heads=4), span_of(seed)
    warehouse = attach(pool, serving.address, ranks=RankInfo(tp_lcm_size=4))
    with serving.connect() as client:
        client.drain()
    assert warehouse.store(span, pool.slots(PAGES)) == [False] * 4
    assert counts.totals()["dropped.draining"] == counts.totals()["dropped_pages"] == 4


def test_pages_whose_other_ranks_never_come_stay_within_the_bound(
    attach: Any, serving: Serving, seed: int, counts: Counts
) -> None:
    pool = ModelPool("page_first", pages=40, layers=32, head_dim=512)  # 1 MiB a page, of 16 MiB
    # The wait for the other rank's pages.
    warehouse = attach(pool, serving.address, ranks=RankInfo(tp_size=2), store_timeout_s=2.0)
    span = span_of(seed, 40)
    assert warehouse.store(span, pool.slots(list(range(40)))) == [False] * 40
    assert 0 < counts.totals()["dropped_pages"] < 40
    assert not warehouse.there(span).any()


def test_threads_that_store_and_load_at_once_read_what_was_stored(
    attach: Any, shared: Serving, seed: int
) -> None:
    pool = ModelPool("layer_first", pages=64)
    warehouse = attach(pool, shared.address)
    pool.fill(seed)
    before = {page: pool.content([page]) for page in range(32)}
    begin, all_stored = threading.Barrier(5), threading.Event()

    def store(first: int) -> None:
        begin.wait()
        for page in range(first, 32, 2):
            assert all(warehouse.store(Span([page_key(f"{seed}{page}")]), pool.slots([page])))

    def load(mine: int) -> int:
        """The last time when all is there, however much faster loads are than stores."""
        begin.wait()
        found = turns = 0
        last = False
        while turns < 20 or not last:
            last = all_stored.is_set()
            turns += 1
            for page in range(32):
                if warehouse.load(Span([page_key(f"{seed}{page}")]), pool.slots([mine])):
                    assert pool.content([mine]) == before[page]
                    found += 1
        return found

    with ThreadPoolExecutor(5) as threads:
        stores = [threads.submit(store, first) for first in (0, 1)]
        loads = [threads.submit(load, 40 + thread) for thread in range(3)]
        try:
            for future in stores:
                future.result()
        finally:
            all_stored.set()
        assert all(future.result() > 0 for future in loads)


def test_pages_that_fit_no_slab_refuse_the_start(attach: Any, tmp_path: Path) -> None:
    with Serving(tmp_path, dram="8MiB") as serving:
        pool = ModelPool("page_first", layers=64, head_dim=4096)
        with pytest.raises(kvw.UsageError, match=str(2 * pool.page_size * 64 * 4 * 4096 * 2)):
            attach(pool, serving.address)
