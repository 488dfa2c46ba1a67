"""A request that waits for what another engine is storing for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse_connectors.vllm.handoff_coordinator as handoff_coordinator
import kvwarehouse_connectors.vllm.scheduler as scheduler_module
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.vllm.handoff import RECORD
from vllm_parts.halves import Engine, same
from vllm_parts.prompts import one_group, stored_prompt, two_sizes
from vllm_parts.requests import request, tokens

Params = dict[str, Any]
PROMPT = 165
WHOLE = 160


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of records, which goes on when a test says so."""
    clock = Clock()
    monkeypatch.setattr(scheduler_module, "boot_s", clock)
    monkeypatch.setattr(handoff_coordinator, "boot_s", clock)
    return clock


def record_of(engine: Engine, ids: list[int], stored_tokens: int = WHOLE, **options: Any) -> Params:
    """What `engine` says when it has given so much of a prompt to be stored; nothing is."""
    one = request(ids, name="told", **options)
    engine.scheduler.on_new_request(one)
    coordinator, tracked = engine.scheduler._coordinator, engine.scheduler._requests["told"]
    assert coordinator is not None
    record = coordinator.record(tracked, stored_tokens)
    engine.scheduler.finished(one)
    assert record is not None
    return record


def comes_with(engine: Engine, ids: list[int], record: Params | None) -> Any:
    """A request that has been told to the scheduler."""
    one = request(ids, name="second", params=record)
    engine.scheduler.on_new_request(one)
    return one


def counts(engine: Engine) -> dict[str, int]:
    """Of hand-offs, since the last time."""
    stats = engine.scheduler.step_ends()
    data = stats.data if stats is not None else {}
    return {name: n for name, n in data.items() if name.startswith("handoff_") and n}


def changed(record: Params, **fields: Any) -> Params:
    return {RECORD: {**record[RECORD], **fields}}


def test_request_waits_for_what_another_engine_stores_and_then_loads_it(
    shared: Serving, rng: random.Random, clock: Clock
) -> None:
    patient = {"handoff_wait_s": 60}
    with (
        Engine(shared.address, one_group, role="kv_producer") as producer,
        Engine(shared.address, one_group, patient, role="kv_consumer") as consumer,
    ):
        ids = tokens(rng, PROMPT)
        content = producer.fill(range(1, 11))
        second = comes_with(consumer, ids, record_of(producer, ids))
        assert consumer.scheduler.matched(second, 0) == (None, False)
        assert counts(consumer) == {"handoff_waits": 1}
        first = request(ids, name="first")
        producer.scheduler.on_new_request(first)
        producer.compute(first, [list(range(1, 12))], PROMPT)
        assert producer.scheduler.finished(first) == record_of(producer, ids)

        def found() -> bool:
            clock.now_s += 0.006
            return bool(consumer.scheduler.matched(second, 0) == (WHOLE, True))

        eventually(found, "it is there")
        assert counts(consumer) == {"handoff_complete": 1}
        blocks = list(range(30, 40))
        consumer.scheduler.allocated(second, [blocks], WHOLE)
        consumer.ended(second)
        assert same(consumer.pages(blocks), content)


def test_request_does_not_wait_longer_than_it_was_told_to(
    engine: Engine, rng: random.Random, clock: Clock
) -> None:
    ids = tokens(rng, PROMPT)
    one = comes_with(engine, ids, record_of(engine, ids))
    assert engine.scheduler.matched(one, 0) == (None, False)
    clock.now_s += 1.9
    assert engine.scheduler.matched(one, 0) == (None, False)
    clock.now_s += 0.2
    assert engine.scheduler.matched(one, 0) == (0, False)
    assert counts(engine) == {"handoff_waits": 1, "handoff_expired": 1}
    assert engine.scheduler.matched(one, 0) == (0, False), "once is enough"
    assert counts(engine) == {}


def test_waiting_request_is_not_looked_up_in_every_step(
    engine: Engine, rng: random.Random, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens(rng, PROMPT)
    one = comes_with(engine, ids, record_of(engine, ids))
    assert engine.scheduler.matched(one, 0) == (None, False)
    looks: list[int] = []
    monkeypatch.setattr(engine.scheduler, "_find", lambda *_: looks.append(1) or (None, True))
    for _ in range(4):
        clock.now_s += 0.001
        assert engine.scheduler.matched(one, 0) == (None, False)
    assert looks == []
    clock.now_s += 0.002
    assert engine.scheduler.matched(one, 0) == (None, False)
    assert looks == [1]


def test_part_that_came_in_time_is_loaded(engine: Engine, rng: random.Random, clock: Clock) -> None:
    ids, _ = stored_prompt(engine, rng)
    more = [*ids, *tokens(rng, 64)]
    one = comes_with(engine, more, record_of(engine, more, 224))
    assert engine.scheduler.matched(one, 0) == (None, False)
    clock.now_s += 2.1
    assert engine.scheduler.matched(one, 0) == (WHOLE, True)
    assert counts(engine) == {"handoff_waits": 1, "handoff_expired": 1}


@pytest.mark.parametrize("record", [{}, {"tokens": 160}, {"version": 1}, [], "x", 7])
def test_odd_record_of_a_hand_off_is_no_reason_to_wait(
    record: Any, engine: Engine, rng: random.Random
) -> None:
    one = comes_with(engine, tokens(rng, PROMPT), {RECORD: record})
    assert engine.scheduler.matched(one, 0) == (0, False)
    assert counts(engine) == {"handoff_malformed": 1}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 2}, "other_version"),
        ({"warehouse": "0" * 32}, "other_warehouse"),
        ({"namespaces": "0" * 32}, "other_namespace"),
        ({"prompt": "0" * 32}, "other_prompt"),
        ({"tokens": 144}, "other_prompt"),
        ({"tokens": 150}, "other_prompt"),
        ({"tokens": 10_000}, "other_prompt"),
        ({"made_s": 997.9}, "late"),
    ],
)
def test_record_of_others_and_a_late_one_are_counted_and_not_waited_for(
    fields: Params, reason: str, engine: Engine, rng: random.Random, clock: Clock
) -> None:
    ids = tokens(rng, PROMPT)
    one = comes_with(engine, ids, changed(record_of(engine, ids), **fields))
    assert engine.scheduler.matched(one, 0) == (0, False)
    assert counts(engine) == {f"handoff_{reason}": 1}


def other_tokens(ids: list[int]) -> tuple[list[int], Params]:
    return [*ids[:-10], 1, *ids[-9:]], {}


def other_salt(ids: list[int]) -> tuple[list[int], Params]:
    return ids, {"cache_salt": "of another"}


def shorter(ids: list[int]) -> tuple[list[int], Params]:
    return ids[:159], {}


@pytest.mark.parametrize("differs", [other_tokens, other_salt, shorter])
def test_record_is_of_one_prompt_alone(
    differs: Callable[[list[int]], tuple[list[int], Params]],
    engine: Engine,
    rng: random.Random,
    clock: Clock,
) -> None:
    ids = tokens(rng, PROMPT)
    record = record_of(engine, ids)
    mine, options = differs(ids)
    one = request(mine, name="second", params=record, **options)
    engine.scheduler.on_new_request(one)
    assert engine.scheduler.matched(one, 0) == (0, False)
    assert counts(engine) == {"handoff_other_prompt": 1}


def test_record_of_an_engine_that_is_set_up_differently_is_not_waited_for(
    shared: Serving, engine: Engine, rng: random.Random, clock: Clock
) -> None:
    ids = tokens(rng, PROMPT)
    with Engine(shared.address, one_group, {"salt": "of another"}, role="kv_producer") as other:
        one = comes_with(engine, ids, record_of(other, ids))
    assert engine.scheduler.matched(one, 0) == (0, False)
    assert counts(engine) == {"handoff_other_namespace": 1}


def test_record_of_another_daemon_is_not_waited_for(
    serving: Serving, engine: Engine, rng: random.Random, clock: Clock
) -> None:
    ids = tokens(rng, PROMPT)
    with Engine(serving.address, one_group, role="kv_producer") as other:
        one = comes_with(engine, ids, record_of(other, ids))
    assert engine.scheduler.matched(one, 0) == (0, False)
    assert counts(engine) == {"handoff_other_warehouse": 1}


def test_engine_that_was_reset_hands_nothing_over_to_others(
    shared: Serving, engine: Engine, rng: random.Random, clock: Clock
) -> None:
    ids = tokens(rng, PROMPT)
    with Engine(shared.address, one_group, role="kv_producer") as other:
        other.scheduler.reset()
        one = comes_with(engine, ids, record_of(other, ids))
    assert engine.scheduler.matched(one, 0) == (0, False)
    assert counts(engine) == {"handoff_other_prompt": 1}


@pytest.mark.usefixtures("end_is_seen")
def test_nobody_waits_when_the_daemon_is_gone(
    serving: Serving, rng: random.Random, clock: Clock
) -> None:
    with Engine(serving.address, one_group) as engine:
        ids = tokens(rng, PROMPT)
        one = comes_with(engine, ids, record_of(engine, ids))
        assert engine.scheduler.matched(one, 0) == (None, False)
        serving.kill()
        eventually(lambda: engine.scheduler._connection.control() is None, "a daemon that is dead")
        clock.now_s += 0.01
        assert engine.scheduler.matched(one, 0) == (0, False)
        assert counts(engine) == {"handoff_waits": 1, "handoff_expired": 1}
        first = request(ids, name="first", params={"kvwarehouse.handoff": True})
        engine.scheduler.on_new_request(first)
        engine.compute(first, [list(range(1, 12))], PROMPT)
        assert engine.scheduler.finished(first) is None, "nobody could find its pages"


def test_request_that_may_not_load_neither_waits_nor_counts(
    engine: Engine, rng: random.Random, clock: Clock
) -> None:
    ids = tokens(rng, PROMPT)
    params = {**record_of(engine, ids), "kvwarehouse.load": False}
    assert engine.scheduler.matched(comes_with(engine, ids, params), 0) == (0, False)
    assert counts(engine) == {}


def test_record_is_of_the_prompt_and_not_of_what_was_generated(
    engine: Engine, rng: random.Random, clock: Clock
) -> None:
    ids = tokens(rng, PROMPT)
    assert record_of(engine, ids, 480) == record_of(engine, ids)
    assert record_of(engine, ids, 170) == record_of(engine, ids, 160)
    one = request(ids, name="short")
    engine.scheduler.on_new_request(one)
    coordinator = engine.scheduler._coordinator
    assert coordinator is not None
    assert coordinator.record(engine.scheduler._requests["short"], 15) is None


def test_record_of_a_stored_prompt_costs_no_wait(
    engine: Engine, rng: random.Random, clock: Clock
) -> None:
    ids, _ = stored_prompt(engine, rng)
    record = record_of(engine, ids)
    clock.now_s += 5_000
    one = comes_with(engine, [*ids, 7], record)
    assert engine.scheduler.matched(one, 0) == (WHOLE, True)
    assert counts(engine) == {"handoff_complete": 1}


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
        one = comes_with(engine, [*ids, *tokens(rng, 100)], record_of(engine, ids, 176))
        assert engine.scheduler.matched(one, 0) == (160, True)
        assert counts(engine) == {"handoff_complete": 1}
