"""Daemons and pages that go between a promise and its load: it brings the right bytes, or ends the
engine with an error; and without a daemon the engine computes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from trtllm_model.collectives import RankFailedError
from trtllm_model.damage import spoil
from trtllm_model.ranks import Engine

Start = Callable[..., Engine]
Prompt = Callable[[int], list[int]]

BROKEN = "could not deliver KV that it had promised"


@pytest.fixture(params=["async", "sync"])
def load(request: pytest.FixtureRequest, environment: pytest.MonkeyPatch) -> str:
    environment.setenv("TLLM_KVW_LOAD", request.param)
    return str(request.param)


def between(engine: Engine, happens: Callable[[], object]) -> None:
    """`happens` once, when the engine has been promised pages and given them blocks, before any
    worker hears of it."""
    park = engine.executor.manager.park_loading
    left = [1]

    def hook(context: list[object]) -> None:
        if left and any(engine.executor.matched.values()):
            left.clear()
            happens()
        park(context)  # type: ignore[arg-type]

    engine.executor.manager.park_loading = hook  # type: ignore[assignment]


def prepared(start: Start, tokens: list[int], **changes: object) -> Engine:
    """A second engine of two ranks; `tokens` are stored."""
    first = start(ranks=2, **changes).ready()
    first.serve(tokens)
    first.wait_stored((len(tokens) - 1) // 8)
    engine = start(ranks=2, **changes).ready()
    engine.executor.matched.clear()
    return engine


def evict_all(dram: Serving) -> None:
    """Of a daemon without NVMe: what is not pinned is gone."""
    with dram.connect() as client:
        assert client.evict(None, 100_000)


def test_daemon_killed_between_promise_and_load_is_not_needed(
    load: str, serving: Serving, start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    engine = prepared(start, tokens)
    between(engine, serving.kill)
    assert engine.serve(tokens, 3) == 56


def test_pins_hold_over_a_restart_against_whoever_wants_the_room(
    load: str, dram: Serving, start: Start, prompt: Prompt
) -> None:
    """What is promised stays where it is, through a kill, another daemon, and an eviction of
    all."""
    tokens = prompt(60)
    engine = prepared(start, tokens)

    def restart() -> None:
        dram.kill()
        dram.start()
        evict_all(dram)

    between(engine, restart)
    assert engine.serve(tokens, 3) == 56
    assert engine.counted("failed_loads") == [0, 0]


def test_eviction_between_promise_and_load_leaves_what_is_pinned(
    load: str, dram: Serving, start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    engine = prepared(start, tokens)
    between(engine, lambda: evict_all(dram))
    assert engine.serve(tokens, 3) == 56


def test_page_damaged_after_its_promise_is_loaded_from_nvme(
    load: str, serving: Serving, start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    engine = prepared(start, tokens)
    with serving.connect() as client:
        client.flush()
    between(engine, lambda: spoil(serving, tokens, block=2, rank=1))
    assert engine.serve(tokens, 3) == 56


def test_page_damaged_after_its_promise_that_is_nowhere_else_ends_the_engine(
    load: str, dram: Serving, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TLLM_KVW_LOAD_TIMEOUT_S", "0.5")
    tokens = prompt(60)
    engine = prepared(start, tokens)
    between(engine, lambda: spoil(dram, tokens, block=2, rank=0))
    with pytest.raises((RuntimeError, RankFailedError), match=BROKEN):
        engine.serve(tokens, 3)


def page_by_page(engine: Engine, between_s: float, clock: SimpleNamespace) -> None:
    """Rank 0 loads as a GPU's memory does, where a call moves a part of a long load: here a page,
    which takes so long by the clock."""
    loads = engine.worker._loads
    load = loads._try

    def load_one(opened: Any, run: Any, done: int, end_s: float) -> kvw.Loaded:
        clock.now_s += between_s
        loaded = int(load(opened, run.cut(0, done + 1), done, end_s))
        missed = len(run.blocks) - done - loaded
        return kvw.Loaded(loaded, {"timeout": missed} if missed else {})

    loads._try = load_one


@pytest.fixture
def clock(environment: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of loads."""
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = lambda: clock.now_s
    environment.setattr("kvwarehouse_connectors.trtllm.loads.time", clock)
    return clock


def test_load_whose_pages_come_takes_as_long_as_it_takes(
    load: str,
    serving: Serving,
    start: Start,
    prompt: Prompt,
    environment: pytest.MonkeyPatch,
    clock: SimpleNamespace,
) -> None:
    """A load of more than 10 GB to a GPU took longer than its timeout, which was one for all of it:
    the engine ended although each page came."""
    environment.setenv("TLLM_KVW_LOAD_TIMEOUT_S", "100")
    tokens = prompt(60)
    engine = prepared(start, tokens)
    page_by_page(engine, 60.0, clock)
    assert engine.serve(tokens, 3) == 56
    assert clock.now_s == 1000.0 + 7 * 60.0
    assert engine.counted("failed_loads") == [0, 0]


def test_load_ends_when_no_page_came_for_its_time(
    load: str,
    dram: Serving,
    start: Start,
    prompt: Prompt,
    environment: pytest.MonkeyPatch,
    clock: SimpleNamespace,
) -> None:
    environment.setenv("TLLM_KVW_LOAD_TIMEOUT_S", "100")
    tokens = prompt(60)
    engine = prepared(start, tokens)
    page_by_page(engine, 60.0, clock)
    between(engine, lambda: spoil(dram, tokens, block=2, rank=0))
    with pytest.raises((RuntimeError, RankFailedError), match=f"{BROKEN}.*and 2 came"):
        engine.serve(tokens, 3)
    assert clock.now_s == 1000.0 + 2 * 60.0 + 2 * 60.0


def test_load_whose_pages_come_makes_no_pause(
    load: str, serving: Serving, start: Start, prompt: Prompt, clock: SimpleNamespace
) -> None:
    """A pause of 20 ms after each 64 MiB made a load slower than the bus by far."""
    tokens = prompt(60)
    engine = prepared(start, tokens)
    page_by_page(engine, 0.0, clock)
    pauses: list[float | None] = []
    closed = engine.worker._loads._closed
    wait = closed.wait
    closed.wait = lambda timeout=None: pauses.append(timeout) or wait(timeout)
    assert engine.serve(tokens, 3) == 56
    assert pauses == [0.0] * 6


def test_load_waits_for_a_daemon_that_its_rank_does_not_see_yet(
    load: str, serving: Serving, start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    engine = prepared(start, tokens)
    connection = engine.worker._connection
    opened, blind = connection.namespace, [True] * 3
    connection.namespace = lambda space: None if blind and blind.pop() else opened(space)
    assert engine.serve(tokens, 3) == 56
    assert not blind


def test_load_that_fails_on_another_rank_ends_the_engine(
    load: str, dram: Serving, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TLLM_KVW_LOAD_TIMEOUT_S", "0.5")
    tokens = prompt(60)
    engine = prepared(start, tokens)
    between(engine, lambda: spoil(dram, tokens, block=2, rank=1))
    # The page is taken out for all ranks: whoever comes to it next has it missing.
    with pytest.raises((RuntimeError, RankFailedError), match=BROKEN):
        engine.serve(tokens, 3)


def test_pages_cleared_by_an_operator_after_their_promise_end_the_engine(
    load: str, serving: Serving, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TLLM_KVW_LOAD_TIMEOUT_S", "0.5")
    tokens = prompt(60)
    engine = prepared(start, tokens)

    def clear() -> None:
        with serving.connect() as client:
            client.clear(all=True)

    between(engine, clear)
    with pytest.raises((RuntimeError, RankFailedError), match=BROKEN):
        engine.serve(tokens, 3)


def test_load_that_a_clear_came_beside_is_not_tried_again(
    load: str, dram: Serving, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    """What other engines stored after the clear, with new weights, went on from what was loaded
    before it."""
    tokens = prompt(60)
    engine = prepared(start, tokens)
    tries: list[int] = []

    def cleared_beside(opened: Any, run: Any, done: int, end_s: float) -> kvw.Loaded:
        tries.append(done)
        return kvw.Loaded(1, {"cleared": len(run.blocks) - done - 1})

    engine.worker._loads._try = cleared_beside
    with pytest.raises((RuntimeError, RankFailedError), match=f"{BROKEN}.*cleared"):
        engine.serve(tokens, 3)
    assert tries == [0]


def test_warehouse_that_lost_all_after_a_promise_ends_the_engine(
    load: str, serving: Serving, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    """The arena that is mapped still has the pages: they may come, or not; other bytes may not."""
    environment.setenv("TLLM_KVW_LOAD_TIMEOUT_S", "0.5")
    tokens = prompt(60)
    engine = prepared(start, tokens)

    def lose() -> None:
        serving.kill()
        shutil.rmtree(serving.arena_dir)
        shutil.rmtree(serving.nvme_dir)
        serving.start()
        seen = engine.worker._connection.client
        eventually(lambda: seen.control().incarnation == 1, "the worker sees the new daemon")

    between(engine, lose)
    with suppress(RuntimeError, RankFailedError):  # the model judges the bytes, if they come
        assert engine.serve(tokens, 3) == 56


def test_engine_computes_without_a_daemon_and_finds_one_that_comes(
    serving: Serving, start: Start, prompt: Prompt
) -> None:
    serving.stop()
    tokens = prompt(60)
    engine = start(ranks=2)
    assert engine.serve(tokens, 3) == 0
    engine.forget_reusable()
    serving.start()
    engine.ready()
    engine.serve(tokens)
    engine.wait_stored(7)
    engine.forget_reusable()
    assert engine.serve(tokens) == 56


def test_engine_goes_on_while_the_daemon_is_stopped(
    load: str, serving: Serving, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    """It is in nobody's way: what is in DRAM is loaded, what is new is computed."""
    tokens = prompt(60)
    engine = prepared(start, tokens)
    environment.setattr("kvwarehouse_connectors.core.daemon_connection._STALLED_S", 1.0)
    serving.pause()
    try:
        eventually(lambda: engine.scheduler._connection.control() is None, "its silence is noticed")
        assert engine.serve(tokens, 3) in (0, 56)
        for _ in range(5):
            assert engine.serve(prompt(60), 2) == 0
    finally:
        serving.resume()
    eventually(lambda: engine.scheduler._connection.control() is not None, "it is alive again")
    more = prompt(60)
    engine.ready().serve(more)
    engine.wait_stored(7)


def test_store_that_fails_is_dropped_and_counted(
    serving: Serving, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TLLM_KVW_STORE_TIMEOUT_S", "0.2")
    engine = start(ranks=2).ready()
    name = engine.submit(prompt(60))
    metadata_of = engine.scheduler.step_metadata

    def stop_first(output: Any) -> Any:
        """Planned with the daemon there, and gone before any rank hears of it."""
        metadata = metadata_of(output)
        if metadata.stores:
            serving.kill()
        return metadata

    engine.scheduler.step_metadata = stop_first
    engine.run()
    assert name not in engine.executor.requests
    eventually(
        lambda: engine.counted("dropped_blocks") == [7, 7], "every block is dropped, and counted"
    )


def test_worker_that_hears_of_a_load_without_an_order_says_so(
    start: Start, environment: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.setenv("TLLM_KVW_LOAD_TIMEOUT_S", "0.05")
    engine = start()
    worker = engine.executor.manager.worker
    assert worker.get_finished([], [99]) == ([], [])

    def raised() -> str:
        try:
            worker.get_finished([], [])
        except RuntimeError as error:
            return str(error)
        return ""

    assert "request 99 that was never ordered" in eventually(raised, "it gives up")


def test_load_is_reported_when_it_is_over_whatever_was_ordered_of_its_request_before(
    start: Start, environment: pytest.MonkeyPatch
) -> None:
    """An offer of which nothing was left is reported at once; the same request may be offered pages
    again."""
    from kvwarehouse_connectors.core.page_run import PageRun
    from kvwarehouse_connectors.trtllm.messages import LoadOrder, TrtllmStepMetadata

    environment.setenv("TLLM_KVW_LOAD_TIMEOUT_S", "30")
    engine = start().ready()
    worker, loads = engine.executor.manager.worker, engine.worker._loads
    worker.bind_connector_meta(TrtllmStepMetadata(loads=[LoadOrder(5, (), waits=False)]))
    worker.start_load_kv(None)
    eventually(lambda: 5 in loads._done, "the empty order is over")
    gate, load = threading.Event(), loads._load
    loads._load = lambda order: gate.wait(60) and load(LoadOrder(5, (), waits=False))
    run = PageRun(0, [b"k" * 32], [1], True)
    worker.bind_connector_meta(TrtllmStepMetadata(loads=[LoadOrder(5, (run,), waits=False)]))
    worker.start_load_kv(None)
    assert worker.get_finished([], [5]) == ([], [])
    gate.set()
    eventually(lambda: worker.get_finished([], []) == ([], [5]), "the load is over")


def test_error_of_a_broken_promise_says_what_and_why(
    start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    from kvwarehouse_connectors.core.page_run import PageRun
    from kvwarehouse_connectors.trtllm.messages import LoadOrder, TrtllmStepMetadata

    environment.setenv("TLLM_KVW_LOAD_TIMEOUT_S", "0.05")
    engine = start().ready()
    run = PageRun(0, [b"k" * 32], [1], True)
    worker = engine.executor.manager.worker
    worker.bind_connector_meta(TrtllmStepMetadata(loads=[LoadOrder(4, (run,), waits=True)]))
    with pytest.raises(RuntimeError) as broken:
        worker.start_load_kv(None)
    assert "request 4 was promised 1 blocks, and 0 came" in str(broken.value)
    assert "TLLM_KVW_LOAD_TIMEOUT_S" in str(broken.value)
    assert isinstance(broken.value.__cause__, kvw.StorageError)
    assert engine.counted("failed_loads") == [1]
