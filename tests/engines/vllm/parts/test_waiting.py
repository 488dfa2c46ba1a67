"""A request that waits for what another engine is storing for it."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from vllm_parts.halves import Engine, same
from vllm_parts.prompts import one_group, stored_prompt, two_sizes
from vllm_parts.requests import request, tokens

import kvwarehouse_connectors.vllm.scheduler as scheduler_module
from kvwarehouse.testing.serving import Serving
from kvwarehouse.testing.until import until


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scheduler_module, "time", clock)
    return clock


def test_request_waits_for_what_another_engine_stores_and_then_loads_it(
    shared: Serving, rng: random.Random, clock: Clock
) -> None:
    with (
        Engine(shared.address, one_group, role="kv_producer") as producer,
        Engine(shared.address, one_group, role="kv_consumer") as consumer,
    ):
        ids = tokens(rng, 165)
        content = producer.fill(range(1, 11))
        first = request(ids, name="first")
        producer.scheduler.on_new_request(first)
        second = request(ids, name="second", params={"kvwarehouse": {"tokens": 160}})
        consumer.scheduler.on_new_request(second)
        assert consumer.scheduler.matched(second, 0) == (None, False)
        producer.compute(first, [list(range(1, 12))], 165)
        assert producer.scheduler.finished(first) == {"kvwarehouse": {"tokens": 160}}

        def found() -> bool:
            clock.now_s += 0.01
            return bool(consumer.scheduler.matched(second, 0) == (160, True))

        until(found, "it is there")
        blocks = list(range(30, 40))
        consumer.scheduler.allocated(second, [blocks], 160)
        consumer.ended(second)
        assert same(consumer.pages(blocks), content)


def test_request_does_not_wait_longer_than_it_was_told_to(
    engine: Engine, rng: random.Random, clock: Clock
) -> None:
    one = request(tokens(rng, 165), params={"kvwarehouse": {"tokens": 160}})
    engine.scheduler.on_new_request(one)
    assert engine.scheduler.matched(one, 0) == (None, False)
    clock.now_s += 1.9
    assert engine.scheduler.matched(one, 0) == (None, False)
    clock.now_s += 0.2
    assert engine.scheduler.matched(one, 0) == (0, False)


@pytest.mark.parametrize(
    "record", [{}, {"tokens": "160"}, {"tokens": -1}, {"tokens": 1 << 40}, [], "x", None, 7]
)
def test_odd_record_of_a_hand_off_is_no_reason_to_wait(
    record: Any, engine: Engine, rng: random.Random
) -> None:
    one = request(tokens(rng, 165), params={"kvwarehouse": record})
    engine.scheduler.on_new_request(one)
    assert engine.scheduler.matched(one, 0) == (0, False)


def test_record_of_more_than_the_prompt_waits_for_no_more_than_the_prompt(
    engine: Engine, rng: random.Random, clock: Clock
) -> None:
    ids, _ = stored_prompt(engine, rng)
    one = request([*ids, 7], name="second", params={"kvwarehouse": {"tokens": 10_000}})
    engine.scheduler.on_new_request(one)
    assert engine.scheduler.matched(one, 0) == (160, True)


def test_longer_prompt_does_not_wait_for_what_no_hit_can_reach(
    shared: Serving, rng: random.Random, clock: Clock
) -> None:
    """Blocks of 16 and 32: of 176 tokens handed over 160 can be loaded, and they are there."""
    with Engine(shared.address, two_sizes) as engine:
        ids = tokens(rng, 176)
        first = request(ids, name="first")
        engine.scheduler.on_new_request(first)
        engine.compute(first, [list(range(1, 12)), list(range(12, 18))], 176)
        engine.stored(request([*ids, 1], name="asks"), 160)
        record = {"kvwarehouse": {"tokens": 176}}
        one = request([*ids, *tokens(rng, 100)], name="second", params=record)
        engine.scheduler.on_new_request(one)
        assert engine.scheduler.matched(one, 0) == (160, True)
