"""Requests that are aborted, preempted, put off or cut into chunks: no block is written that is
another's, none is kept, nothing is stored that was not computed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from trtllm_model.ranks import Engine, Spec
from trtllm_model.request import State

Start = Callable[..., Engine]
Prompt = Callable[[int], list[int]]

# Traffic goes on until something was loaded, however slow the machine is beside the model's steps.
LEAST_ACTS, MOST_ACTS = 60, 2_000


def prepared(start: Start, tokens: list[int], **changes: Any) -> Engine:
    """A second engine; `tokens` are stored."""
    first = start(ranks=2, **changes).ready()
    first.serve(tokens)
    first.wait_stored((len(tokens) - 1) // 8)
    return start(ranks=2, **changes).ready()


def gate(engine: Engine) -> threading.Event:
    """Loads of rank 0 wait until it is set."""
    opened = threading.Event()
    loads = engine.worker._loads
    load = loads._load

    def gated(order: Any) -> None:
        assert opened.wait(60)
        load(order)

    loads._load = gated
    return opened


@pytest.mark.parametrize("kind", ["pool", "layout"])
def test_request_aborted_while_it_loads_ends_when_nothing_writes_its_blocks(
    kind: str, start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    engine = prepared(start, tokens, kind=kind)
    idle = engine.idle_blocks()
    opened = gate(engine)
    name = engine.submit(tokens, 3)
    engine.step(3)
    assert engine.executor.requests[name].model.state is State.LOADING
    engine.abort(name)
    engine.step(5)
    assert name in engine.executor.requests
    opened.set()
    engine.run()
    assert engine.idle_blocks() == idle
    assert engine.scheduler._requests == {}
    assert engine.serve(tokens) in (0, 56)


def test_pins_of_a_load_whose_request_is_gone_stay_for_as_long_as_its_size_may_take(
    start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    """They went after twice the timeout, which a long load whose pages come may take."""
    clock = SimpleNamespace(now_s=1000.0, time_ns=time.time_ns)
    clock.monotonic = lambda: clock.now_s
    environment.setenv("TLLM_KVW_LOAD_TIMEOUT_S", "10")
    environment.setattr("kvwarehouse_connectors.trtllm.scheduler.time", clock)
    tokens = prompt(60)
    engine = prepared(start, tokens)
    scheduler = engine.scheduler
    [space] = scheduler.cache_info.spaces
    environment.setattr(
        "kvwarehouse_connectors.trtllm.scheduler._SLOWEST_BYTES_PER_S", space.page_bytes
    )
    opened = gate(engine)
    name = engine.submit(tokens, 3)
    engine.step(3)
    hit = scheduler._requests[name].loading
    scheduler.reset(engine.executor.requests[name])
    clock.now_s += 20.0 + 6.5
    scheduler._steps_ended()
    assert hit.pins
    clock.now_s += 1.0
    scheduler._steps_ended()
    assert not hit.pins
    opened.set()
    engine.run()


def test_request_aborted_before_it_has_blocks_leaves_nothing(start: Start, prompt: Prompt) -> None:
    tokens = prompt(60)
    engine = prepared(start, tokens, kind="layout", blocks=12)
    busy = engine.submit(prompt(60), 20)
    engine.step(2)
    name = engine.submit(tokens, 3)
    engine.step(2)
    assert engine.scheduler._requests[name].hit is not None
    engine.abort(name)
    engine.run()
    assert busy not in engine.scheduler._requests
    assert engine.scheduler._requests == {}


def test_request_aborted_while_it_generates_stores_what_it_had(
    start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    engine = start(ranks=2).ready()
    name = engine.submit(tokens, 50)
    engine.step(5)
    engine.abort(name)
    engine.run()
    engine.wait_stored(7)
    assert start(ranks=2).ready().serve(tokens) == 56


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("windows", [(), (20,)])
def test_request_that_is_preempted_begins_anew_with_right_bytes(
    windows: tuple[int, ...], load: str, start: Start, prompt: Prompt, environment: Any
) -> None:
    environment.setenv("TLLM_KVW_LOAD", load)
    tokens, others = prompt(60), prompt(60)
    engine = prepared(start, tokens, kind="layout", windows=windows, chunk_tokens=24)
    name = engine.submit(tokens, 30)
    while engine.executor.requests[name].model.state is not State.GENERATION:
        engine.step()
    engine.step(4)
    generated = len(engine.executor.requests[name].get_tokens(0)) - 60
    engine.preempt(name)
    # Its blocks are another's before it comes back.
    engine.submit(others, 2)
    engine.run()
    assert engine.executor.matched[name] >= 56
    assert generated >= 4
    third = start(kind="layout", ranks=2, windows=windows, chunk_tokens=24).ready()
    assert third.serve(tokens + prompt(3), 2) == 56
    third.forget_reusable()
    assert third.serve(others + prompt(3), 2) == 56


def test_request_preempted_in_the_middle_of_its_prompt_stores_only_what_is_computed(
    start: Start, prompt: Prompt
) -> None:
    tokens = prompt(100)
    engine = start(kind="layout", ranks=2, chunk_tokens=24).ready()
    name = engine.submit(tokens, 2)
    engine.step(2)
    engine.preempt(name)
    engine.submit(prompt(100), 2)
    engine.run()
    second = start(kind="layout", ranks=2).ready()
    second.serve(prompt(5))
    assert second.serve(tokens + prompt(2), 2) % 8 == 0


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("honours", [0, 8, 16, 40])
def test_offer_that_the_engine_takes_in_part_is_right_all_the_same(
    honours: int, load: str, start: Start, prompt: Prompt, environment: Any
) -> None:
    environment.setenv("TLLM_KVW_LOAD", load)
    tokens = prompt(60)
    first = start(kind="layout", ranks=2, windows=(20,)).ready()
    first.serve(tokens)
    first.wait_stored(7)
    engine = start(kind="layout", ranks=2, windows=(20,), chunk_tokens=16, honours=honours).ready()
    assert engine.serve(tokens, 3) == honours
    engine.forget_reusable()
    more = tokens + prompt(40)
    engine.serve(more, 3)
    third = start(kind="layout", ranks=2, windows=(20,)).ready()
    third.serve(more + prompt(2), 2)


def test_offer_is_kept_for_a_request_that_waits_for_room(start: Start, prompt: Prompt) -> None:
    """V2 asks once, and may take up the answer much later."""
    tokens = prompt(60)
    engine = prepared(start, tokens, kind="layout", blocks=12)
    busy = engine.submit(prompt(60), 20)
    engine.step(2)
    name = engine.submit(tokens, 3)
    engine.step(6)
    assert busy in engine.executor.requests
    engine.run()
    assert engine.executor.matched[name] == 56


def test_cancelled_offer_lets_its_pins_go_and_an_awaited_one_is_answered(
    start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    engine = prepared(start, tokens, kind="layout", honours=0)
    query = engine.executor.manager.query

    def cancelled(request: Any, local: int) -> tuple[int, bool]:
        answer = query(request, local)
        if answer[0]:
            engine.executor.manager.scheduler.cancel_load(request, 0, answer[0])
            assert engine.scheduler._requests[request.request_id].hit is None
        return answer

    engine.executor.manager.query = cancelled  # type: ignore[method-assign]
    assert engine.serve(tokens, 3) == 0


def test_chunk_after_chunk_is_stored_as_it_is_computed(start: Start, prompt: Prompt) -> None:
    tokens = prompt(100)
    engine = start(ranks=2, chunk_tokens=24).ready()
    name = engine.submit(tokens, 20)
    engine.step(2)
    assert engine.executor.requests[name].context_current_position == 48
    engine.wait_stored(6)
    other = start(ranks=2).ready()
    assert other.serve(tokens[:60], 2) == 48
    engine.run()


def running(engine: Engine) -> list[int]:
    """Requests that hold blocks and compute."""
    return [
        name
        for name, request in engine.executor.requests.items()
        if request.model.state in (State.CONTEXT_INIT, State.GENERATION) and request.model.allocated
    ]


def wait_found(engines: list[Engine], client: kvw.Client) -> None:
    """Until all ranks are connected with the daemon that was started anew."""
    client.refresh(timeout_s=60)
    now = client.control().incarnation
    for engine in engines:
        connection = engine.scheduler._connection
        eventually(
            lambda at=connection: at.client.control().incarnation == now, "the daemon is found"
        )
        engine.ready()


@pytest.mark.parametrize(
    "spec",
    [
        Spec(ranks=2, blocks=30),
        Spec(ranks=2, blocks=30, chunk_tokens=16, lags=(0, 2)),
        Spec(kind="layout", ranks=2, blocks=30, windows=(20,), chunk_tokens=24),
    ],
    ids=["whole", "chunks", "regions"],
)
def test_traffic_of_all_kinds_never_meets_a_wrong_byte(
    spec: Spec, serving: Serving, start: Start, rng: random.Random
) -> None:
    """Two engines that share prompts, over a daemon that evicts, is killed and comes back. The
    model checks every byte that attention reads."""
    roots = [[rng.randrange(50_000) for _ in range(40)] for _ in range(3)]
    engines = [start(spec).ready(), start(spec).ready()]

    def loaded() -> int:
        return sum(sum(engine.counted("loaded_blocks")) for engine in engines)

    with serving.connect() as client:
        for number in range(MOST_ACTS):
            if number >= LEAST_ACTS and loaded():
                break
            engine = rng.choice(engines)
            act = rng.random()
            if act < 0.55:
                length = rng.randrange(1, 90)
                tail = [rng.randrange(50_000) for _ in range(30)]
                tokens = (rng.choice(roots) + rng.choice(roots) + tail)[:length]
                salt = rng.choice([None, None, "a", "b"])
                engine.submit(tokens, rng.randrange(1, 12), salt)
            elif act < 0.65 and engine.executor.requests:
                engine.abort(rng.choice(list(engine.executor.requests)))
            elif act < 0.75 and spec.kind == "layout" and (names := running(engine)):
                engine.preempt(rng.choice(names))
            elif act < 0.85:
                client.evict(None, rng.randrange(1, 20))
            elif act < 0.88 and number > 20:
                serving.kill()
                serving.start()
                if rng.random() < 0.5:  # else traffic goes on before the engines find it again
                    wait_found(engines, client)
            for one in engines:
                one.step(rng.randrange(1, 6))
        for engine in engines:
            engine.run()
            assert engine.counted("failed_loads") == [0, 0]
            assert engine.scheduler._requests == {}
            assert engine.idle_blocks()[0] == engine.idle_blocks()[1]
    assert loaded()
