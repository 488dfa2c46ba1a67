"""A load that keeps to a schedule: simulated on a clock that only arrivals move."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvwarehouse as kvw
from kvwarehouse_connectors.core.load_policy import Schedule
from kvwarehouse_connectors.core.loading import LoadResult, load_in_time

PROMISE = 1.05
NEVER = float("inf")
CALL_S = 1e-6
"""What a call costs by itself: without it, rounding could stop the clock for good."""
NO_SCHEDULE = Schedule(0.0, 1e9)


class Disk:
    """Pages that come in order, each at its time; the clock moves with calls and waiting only."""

    def __init__(self, arrivals_s: Sequence[float], *, lost_from: int | None = None) -> None:
        self.arrivals_s = sorted(arrivals_s)
        self.lost_from = lost_from
        self.now_s = 1000.0
        self.begin_s = self.now_s
        self.calls = 0

    def clock(self) -> float:
        return self.now_s

    def load(self, first: int, timeout_s: float) -> kvw.Loaded:
        self.calls += 1
        self.now_s += CALL_S
        assert self.calls <= 2 * len(self.arrivals_s) + 10, "it asks without end"
        assert timeout_s >= 0
        until = self.now_s - self.begin_s + timeout_s
        pages = len(self.arrivals_s)
        if self.lost_from is not None and self._there(until) >= self.lost_from:
            there = max(self.lost_from, first)
            self._wait(self.arrivals_s[there - 1] if there else 0.0)
            return kvw.Loaded(there - first, {"absent": pages - there})
        there = self._there(until)
        if there == pages:
            self._wait(self.arrivals_s[-1])
            return kvw.Loaded(pages - first)
        self._wait(until)
        return kvw.Loaded(max(0, there - first), {"timeout": pages - max(there, first)})

    def _there(self, at_s: float) -> int:
        return bisect.bisect_right(self.arrivals_s, at_s)

    def _wait(self, until_s: float) -> None:
        self.now_s = max(self.now_s, self.begin_s + until_s)


def run(disk: Disk, schedule: Schedule, most_s: float = 1e9) -> LoadResult:
    return load_in_time(disk.load, len(disk.arrivals_s), schedule, most_s, clock=disk.clock)


def test_load_is_whole_when_every_page_comes_in_time() -> None:
    result = run(Disk([0.01, 0.02, 0.03]), Schedule(0.1, 0.02))
    assert (result.pages, result.missed) == (3, {})
    assert result.seconds == pytest.approx(0.03)


def test_load_ends_at_the_first_page_that_is_late_and_keeps_those_before_it() -> None:
    result = run(Disk([0.005, 0.105, NEVER]), Schedule(0.1, 0.01))
    assert result.pages == 2
    assert result.missed == {"late": 1}


def test_load_of_nothing_in_time_is_given_up_when_the_first_page_is_late() -> None:
    result = run(Disk([NEVER] * 100), Schedule(0.1, 0.01))
    assert result.pages == 0
    assert result.missed == {"late": 100}
    assert result.seconds <= 0.01 + 10 * CALL_S


def test_load_ends_at_once_when_a_page_cannot_come() -> None:
    disk = Disk([0.01] * 10, lost_from=4)
    result = run(disk, Schedule(1.0, 1.0))
    assert result.pages == 4
    assert result.missed == {"absent": 6}
    assert result.seconds == pytest.approx(0.01)
    assert disk.calls == 1


def test_load_ends_where_a_clear_came_beside_it_though_other_pages_may_yet_come() -> None:
    """What is stored after a clear can be of other weights than what was loaded before it."""
    calls: list[int] = []

    def load(first: int, timeout_s: float) -> kvw.Loaded:
        calls.append(first)
        return kvw.Loaded(2, {"cleared": 1, "timeout": 5})

    result = load_in_time(load, 8, NO_SCHEDULE, 1e9)
    assert (result.pages, calls) == (2, [0])
    assert result.missed == {"cleared": 1, "timeout": 5}


def test_load_without_a_schedule_is_bounded_by_the_time_it_may_take() -> None:
    result = run(Disk([0.1 * page for page in range(1, 101)]), NO_SCHEDULE, most_s=5.05)
    assert result.pages == 50
    assert result.missed == {"late": 50}
    assert result.seconds == pytest.approx(5.05, abs=1e-3)


def test_load_of_no_pages_asks_for_none() -> None:
    disk = Disk([])
    assert run(disk, NO_SCHEDULE).pages == 0
    assert disk.calls == 0


@pytest.mark.parametrize(
    ("first", "second", "pages"),
    [
        (LoadResult(4, 0.1), LoadResult(3, 0.3), 7),
        (LoadResult(4, 0.1), LoadResult(1, 0.3, {"absent": 2}), 5),
        (LoadResult(2, 0.1, {"late": 2}), LoadResult(3, 0.3), 2),
        (LoadResult(0, 0.1, {"late": 4}), LoadResult(0, 0.3, {"absent": 3}), 0),
    ],
)
def test_of_two_parts_that_load_side_by_side_only_what_came_in_order_counts(
    first: LoadResult, second: LoadResult, pages: int
) -> None:
    both = first.then(second, 4)
    assert both.pages == pages
    assert both.seconds == 0.3
    assert bool(both.missed) == (pages < 7)


def test_pages_of_a_later_part_are_due_when_they_are_in_the_whole() -> None:
    whole = Schedule.of(10, 0.5)
    assert whole.after(4).due_s(3) == pytest.approx(whole.due_s(7))


def arrivals(rng: random.Random, pages: int, page_compute_s: float) -> list[float]:
    """A disk of any speed, even or in bursts, that may stall for a while or for ever."""
    step_s = page_compute_s * 10 ** rng.uniform(-2, 2)
    burst = rng.choice([1, 1, 4, 32])
    noise = rng.choice([0.0, 1.0, 5.0])
    at = rng.choice([0.0, 0.0, rng.uniform(0, 3) * page_compute_s * pages])
    found = []
    for page in range(pages):
        if page % burst == 0:
            at += step_s * burst * (1 + noise * rng.expovariate(1.0))
        if rng.random() < 0.01:
            at += rng.choice([rng.uniform(0, pages) * page_compute_s, NEVER])
        found.append(at)
    return found


@given(st.integers(0, 1 << 32), st.integers(1, 2000), st.floats(1e-4, 1.0))
def test_load_and_computing_the_rest_is_never_behind_by_more_than_slack(
    chance: int, pages: int, page_compute_s: float
) -> None:
    disk = Disk(arrivals(random.Random(chance), pages, page_compute_s))
    schedule = Schedule.of(pages, page_compute_s)
    result = run(disk, schedule)
    total_s = result.seconds + (pages - result.pages) * page_compute_s
    bound_s = pages * page_compute_s + schedule.slack_s
    assert total_s <= bound_s + (disk.calls + 1) * CALL_S


@given(st.integers(0, 1 << 32), st.integers(1, 2000), st.floats(1e-4, 1.0))
def test_load_and_computing_the_rest_costs_at_most_5_percent_at_any_speed(
    chance: int, pages: int, page_compute_s: float
) -> None:
    disk = Disk(arrivals(random.Random(chance), pages, page_compute_s))
    compute_s = pages * page_compute_s
    result = run(disk, Schedule.of(pages, page_compute_s))
    total_s = result.seconds + (pages - result.pages) * page_compute_s
    assert total_s <= PROMISE * compute_s + (disk.calls + 1) * CALL_S


def test_load_that_comes_late_itself_takes_what_is_at_hand() -> None:
    disk = Disk([0.0] * 4 + [NEVER] * 4)
    begin_s = disk.now_s - 100.0
    schedule = Schedule(0.1, 0.01)
    result = load_in_time(disk.load, 8, schedule, 1e9, begin_s=begin_s, clock=disk.clock)
    assert result.pages == 4
    assert result.missed == {"late": 4}
    assert result.seconds < 0.001
