"""How fast a store gives objects."""

from __future__ import annotations

import pytest

from kvwarehouse.remote.read_rates import FORGOTTEN_S, ReadFigures, ReadRates, ReadTime


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def read(rates: ReadRates, clock: Clock, first_byte_s: float, body_s: float, size: int) -> None:
    took = rates.begin()
    clock.now_s += first_byte_s
    took.first_byte()
    clock.now_s += body_s
    took.end(size)


def test_nothing_is_known_before_a_read(clock: Clock) -> None:
    assert ReadRates(clock).figures() == ReadFigures(0, 0.0)


def test_rate_is_that_of_bodies_and_first_bytes_are_apart(clock: Clock) -> None:
    rates = ReadRates(clock)
    read(rates, clock, 0.5, 2.0, 4000)
    assert rates.figures() == ReadFigures(2000, 0.5)


def test_bodies_that_come_side_by_side_are_one_rate(clock: Clock) -> None:
    rates = ReadRates(clock)
    took: list[ReadTime] = [rates.begin() for _ in range(4)]
    for each in took:
        each.first_byte()
    clock.now_s += 2
    for each in took:
        each.end(1000)
    clock.now_s += 10  # nothing comes
    assert rates.figures().bytes_per_s == 2000


def test_figures_follow_what_is_measured(clock: Clock) -> None:
    rates = ReadRates(clock)
    for _ in range(30):
        read(rates, clock, 0.1, 1.0, 1000)
        rates.figures()
    for _ in range(30):
        read(rates, clock, 0.4, 1.0, 9000)
        rates.figures()
    figures = rates.figures()
    assert figures.bytes_per_s == pytest.approx(9000, rel=0.02)
    assert figures.first_byte_s == pytest.approx(0.4, rel=0.05)


def test_read_that_found_nothing_says_nothing(clock: Clock) -> None:
    rates = ReadRates(clock)
    took = rates.begin()
    clock.now_s += 5
    took.end()
    assert rates.figures() == ReadFigures(0, 0.0)


def test_read_that_breaks_off_counts_its_time(clock: Clock) -> None:
    rates = ReadRates(clock)
    read(rates, clock, 0.0, 1.0, 0)
    read(rates, clock, 0.0, 1.0, 1000)
    assert rates.figures().bytes_per_s == 500


def test_what_was_measured_long_ago_is_forgotten(clock: Clock) -> None:
    rates = ReadRates(clock)
    read(rates, clock, 0.5, 2.0, 4000)
    clock.now_s += FORGOTTEN_S
    assert rates.figures().bytes_per_s == 2000
    clock.now_s += 1
    assert rates.figures() == ReadFigures(0, 0.0)
    read(rates, clock, 0.25, 1.0, 4000)
    assert rates.figures() == ReadFigures(4000, 0.25)
