"""Blocks that could not be copied in the step that filled them are held when their request ends:
for a bounded time, until every rank has copied them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_connectors.core.page_run import PageRun
from kvwarehouse_connectors.trtllm.counts import Counts
from kvwarehouse_connectors.trtllm.deferred_frees import DeferredFrees
from kvwarehouse_connectors.trtllm.messages import SaveOrder
from trtllm_model.ranks import Engine

Start = Callable[..., Engine]
Prompt = Callable[[int], list[int]]

# A block of the model has 3,072 bytes: a ring of 1 MiB takes 170 of them in a step.
TOKENS = 8 * 300


@pytest.fixture
def small_ring(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TLLM_KVW_STAGING_BYTES", "1MiB")


def test_blocks_left_out_for_want_of_room_are_held_and_stored(
    small_ring: None, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TLLM_KVW_HOLD_S", "60")
    tokens = prompt(TOKENS)
    engine = start(ranks=2, blocks=420, lags=(0, 2)).ready()
    idle = engine.idle_blocks()
    held = engine.submit(tokens, 1)
    engine.step()
    assert engine.scheduler.counts["held_requests"] == 1

    def over() -> bool:
        beside = engine.submit(prompt(5), 2)  # what a hold is ordered with
        while beside in engine.executor.requests:
            engine.step()
        return held not in engine.executor.requests

    eventually(over, "every rank has copied what was held")
    assert engine.idle_blocks() == idle
    engine.wait_stored(300)
    assert engine.counted("expired_holds") == [0, 0]


def test_hold_ends_with_its_time_where_no_step_follows(
    small_ring: None, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    """Nothing is scheduled, so no order reaches the other rank: its blocks come back all the
    same."""
    environment.setenv("TLLM_KVW_HOLD_S", "0.2")
    engine = start(ranks=2, blocks=320).ready()
    idle = engine.idle_blocks()
    engine.serve(prompt(TOKENS))
    assert engine.idle_blocks() == idle
    assert engine.counted("expired_holds") == [1, 1]
    engine.serve(prompt(5), 3)  # the order comes too late, and is passed over
    eventually(lambda: min(engine.counted("dropped_blocks")) > 0, "what was left is counted")


def test_nothing_is_held_where_a_setting_says_so(
    small_ring: None, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TLLM_KVW_HOLD_S", "0")
    engine = start(blocks=320).ready()
    engine.submit(prompt(TOKENS), 1)
    engine.step()
    assert not engine.executor.requests
    assert engine.scheduler.counts["held_requests"] == 0
    engine.serve(prompt(5))
    assert engine.scheduler.counts["dropped_blocks"] == 300 - 170


class Copies:
    """Takes copies while there is room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks: list[int] = []

    def __call__(self, run: PageRun) -> bool:
        if self.room < len(run.blocks):
            return False
        self.room -= len(run.blocks)
        self.blocks += run.blocks
        return True


def held(copies: Copies, hold_s: float = 60.0) -> tuple[DeferredFrees, Counts]:
    counts = Counts("test")
    return DeferredFrees(copies, [2], hold_s, counts), counts


def order(name: int, blocks: int) -> SaveOrder:
    keys = [bytes([block]) for block in range(blocks)]
    return SaveOrder(name, (PageRun(0, keys, list(range(blocks)), True),))


def test_held_request_is_reported_once_when_all_is_copied() -> None:
    copies = Copies(room=3)
    frees, _ = held(copies)
    assert frees.finished([7]) == []
    frees.ordered([order(7, 5)])
    assert frees.finished([]) == []
    assert copies.blocks == [0, 1]
    copies.room = 3
    assert frees.finished([]) == [7]
    assert copies.blocks == [0, 1, 2, 3, 4]
    assert frees.finished([]) == []


def test_blocks_of_a_request_that_is_not_held_are_never_copied() -> None:
    """They may be another's by now."""
    copies = Copies(room=10)
    frees, counts = held(copies)
    frees.ordered([order(7, 5)])
    assert frees.finished([]) == []
    assert copies.blocks == []
    assert counts["dropped_blocks"] == 5


def test_hold_that_is_over_copies_no_more(monkeypatch: Any) -> None:
    copies = Copies(room=0)
    frees, counts = held(copies, hold_s=0.0)
    frees.finished([])
    assert frees.finished([7]) == [7]
    frees.ordered([order(7, 4)])
    copies.room = 10
    assert frees.finished([]) == []
    assert copies.blocks == []
    assert counts["expired_holds"] == 1
