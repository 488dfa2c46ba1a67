"""How much of a stored prefix is worth loading, and by when it has to come."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvwarehouse as kvw
from kvwarehouse_connectors.core.load_policy import (
    PrefillRate,
    Schedule,
    TierRates,
    worth_loading,
)

DRAM, NVME, REMOTE = int(kvw.Tier.DRAM), int(kvw.Tier.NVME), int(kvw.Tier.REMOTE)
MIB = 1 << 20
OVERHEAD_S = 0.002


def tiers(*runs: tuple[int, int]) -> np.ndarray:
    """tiers((DRAM, 3), (NVME, 2))"""
    return np.repeat([tier for tier, _ in runs], [count for _, count in runs]).astype(np.uint8)


def rates(dram: float = 10e9, nvme: float = 1e9, wait_s: float = 0.0) -> TierRates:
    return TierRates(dram, nvme, wait_s)


def test_nothing_is_loaded_where_nothing_is_stored() -> None:
    assert worth_loading(tiers(), MIB, 1.0, rates()) == 0


def test_all_is_loaded_where_every_page_comes_faster_than_it_is_computed() -> None:
    where = tiers((DRAM, 10), (NVME, 10))
    assert worth_loading(where, MIB, 0.1, rates()) == 20


def test_nothing_is_loaded_where_computing_is_faster_than_any_tier() -> None:
    where = tiers((DRAM, 10), (NVME, 10))
    assert worth_loading(where, 100 * MIB, 1e-4, rates()) == 0


def test_load_ends_where_the_slow_tier_begins_when_that_is_slower_than_computing() -> None:
    where = tiers((DRAM, 10), (NVME, 10))
    assert worth_loading(where, 10 * MIB, 0.005, rates(dram=10e9, nvme=1e9)) == 10


def test_slow_pages_in_between_are_loaded_when_the_fast_ones_behind_them_are_worth_it() -> None:
    where = tiers((DRAM, 10), (NVME, 1), (DRAM, 100))
    assert worth_loading(where, 10 * MIB, 0.005, rates()) == 111


def test_remote_store_is_loaded_from_where_that_is_faster_than_computing() -> None:
    where = tiers((DRAM, 10), (NVME, 10), (REMOTE, 20))
    fast = TierRates(remote_bytes_per_s=1e9, remote_wait_s=0.1)
    assert worth_loading(where, MIB, 0.1, fast) == 40
    assert worth_loading(where, MIB, 0.1, replace(fast, remote_bytes_per_s=1e6)) == 20
    # 40 pages of 0.1 s: the first remote one is due after 20 of them, and 3 % of all.
    assert worth_loading(where, MIB, 0.1, replace(fast, remote_wait_s=2.2)) == 20
    assert worth_loading(tiers((REMOTE, 20)), MIB, 0.1, fast) == 0


def test_reads_that_are_queued_already_count_against_the_slow_tier_once() -> None:
    where = tiers((NVME, 10))
    assert worth_loading(where, MIB, 0.1, rates(wait_s=0.02)) == 10
    assert worth_loading(where, MIB, 0.1, rates(wait_s=0.04)) == 0
    assert worth_loading(tiers((DRAM, 5), (NVME, 5)), MIB, 0.1, rates(wait_s=0.6)) == 5


def test_load_that_saves_less_than_it_costs_the_scheduler_is_not_begun() -> None:
    assert worth_loading(tiers((DRAM, 1)), 1, OVERHEAD_S * 0.9, rates()) == 0
    assert worth_loading(tiers((DRAM, 1)), 1, OVERHEAD_S * 1.1, rates()) == 1


@given(
    st.lists(st.sampled_from([DRAM, NVME]), min_size=1, max_size=60),
    st.integers(1, 1 << 28),
    st.floats(1e-6, 1.0),
    st.floats(1e6, 1e11),
    st.floats(1e6, 1e11),
    st.floats(0, 5),
)
def test_no_other_prefix_saves_more(
    where: list[int],
    page_bytes: int,
    page_compute_s: float,
    dram: float,
    nvme: float,
    wait_s: float,
) -> None:
    def saved_s(pages: int) -> float:
        if not pages:
            return 0.0
        if NVME in where[:pages] and late:
            return float("-inf")
        read = [page_bytes / (nvme if tier == NVME else dram) for tier in where[:pages]]
        queued = wait_s if NVME in where[:pages] else 0.0
        return pages * page_compute_s - sum(read) - queued - OVERHEAD_S

    # A page that would come late is not begun with.
    first = where.index(NVME) if NVME in where else 0
    arrives_s = wait_s + page_bytes / nvme + 0.0005
    late = arrives_s > Schedule.of(len(where), page_compute_s).due_s(first)
    given_rates = TierRates(dram, nvme, wait_s)
    chosen = worth_loading(np.array(where, np.uint8), page_bytes, page_compute_s, given_rates)
    best = max(saved_s(pages) for pages in range(len(where) + 1))
    assert saved_s(chosen) == pytest.approx(best, abs=1e-6 * len(where) * (1 + abs(best)))


def test_prefill_rate_is_assumed_until_a_large_step_was_measured() -> None:
    rate = PrefillRate(1000.0)
    rate.step(1, 1, 1.0)
    rate.step(63, 63, 1.0)
    rate.step(4096, 4096, 0.0)
    assert not rate.measured
    assert rate.tokens_per_s == 1000.0
    rate.step(64, 64, 0.016)
    assert rate.measured
    assert rate.tokens_per_s == pytest.approx(4000)


def test_prefill_rate_follows_the_engine_and_not_one_odd_step() -> None:
    rate = PrefillRate(1.0)
    for _ in range(20):
        rate.step(1000, 1000, 1.0)
    rate.step(1000, 1000, 50.0)
    assert rate.tokens_per_s == 1000
    for _ in range(8):
        rate.step(4000, 4000, 1.0)
    assert rate.tokens_per_s == 4000


def test_prefill_rate_of_a_busy_engine_is_not_how_fast_it_decodes() -> None:
    rate = PrefillRate(1.0)
    rate.step(8192, 8192, 0.25)
    for _ in range(50):
        rate.step(0, 128, 0.025)  # 128 requests decode
        rate.step(64, 192, 0.025)
    assert rate.tokens_per_s == 8192 / 0.25


def test_schedule_gives_each_page_the_time_of_computing_it() -> None:
    schedule = Schedule.of(100, 0.01)
    steps = [schedule.due_s(page + 1) - schedule.due_s(page) for page in range(10)]
    assert steps == pytest.approx([0.01] * 10)


def test_schedule_gives_a_load_less_than_the_promise_beyond_computing() -> None:
    assert Schedule.of(1, 1e-6).slack_s <= 0.05 * 1e-6
    assert Schedule.of(1000, 0.1).slack_s <= 0.05 * 1000 * 0.1
