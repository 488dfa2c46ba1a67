"""What is promised: pages in DRAM, verified, within the time of a lookup; the rest next time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.trtllm import offers, scheduler, verified_pages
from kvwarehouse_connectors.trtllm.keys import PromptKeys
from trtllm_model.damage import spoil
from trtllm_model.pools import page_of
from trtllm_model.ranks import Engine

Start = Callable[..., Engine]
Prompt = Callable[[int], list[int]]


def fill(start: Start, tokens: list[int], blocks: int, **changes: object) -> Engine:
    engine = start(**changes).ready()
    engine.serve(tokens)
    engine.wait_stored(blocks)
    return engine


def promised_after_a_while(engine: Engine, tokens: list[int], expected: int) -> None:
    """A request finds pages and promises none; a later one does. One that finds nothing is asked
    again: where the daemon is held up in an entry of the index for 20 ms, a lookup takes that page
    for missing, and these pages are on their way to NVMe."""

    def unready() -> bool:
        engine.forget_reusable()
        assert engine.serve(tokens) == 0
        return bool(engine.scheduler.counts["unready_hits"] == 1)

    eventually(unready, "a request finds the pages")

    def found() -> bool:
        engine.forget_reusable()
        return engine.serve(tokens) == expected

    eventually(found, "the pages are ready")


@pytest.mark.parametrize("kind", ["pool", "layout"])
def test_pages_on_nvme_are_brought_for_the_next_request(
    kind: str, serving: Serving, start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    fill(start, tokens, 7, kind=kind, ranks=2)
    engine = start(kind=kind, ranks=2).ready()
    with serving.connect() as client:
        client.flush()
        client.evict(None, 1000)
    promised_after_a_while(engine, tokens, 56)


def test_pages_behind_one_on_nvme_are_left_and_those_before_it_promised(
    serving: Serving, start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    fill(start, tokens, 7)
    engine = start().ready()
    with serving.connect() as client:
        client.flush()
        assert (
            client.evict(engine.scheduler.cache_info.spaces[0], 3) == 3
        )  # the chain's end is coldest
    assert engine.serve(tokens) == 32


def test_lookup_without_time_promises_only_what_is_verified_already(
    start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    tokens = prompt(60)
    fill(start, tokens, 7, ranks=2)
    environment.setenv("TLLM_KVW_LOOKUP_BUDGET_S", "0")
    promised_after_a_while(start(ranks=2).ready(), tokens, 56)


def test_damaged_page_is_not_promised_and_comes_from_nvme_for_a_later_request(
    serving: Serving, start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    fill(start, tokens, 7, ranks=2)
    with serving.connect() as client:
        client.flush()
    spoil(serving, tokens, block=3, rank=0)
    engine = start(ranks=2).ready()
    # The lookup goes on for as long as it may: the page may have come by its end.
    assert engine.serve(tokens) in (24, 56)

    def whole() -> bool:
        engine.forget_reusable()
        return engine.serve(tokens) == 56

    eventually(whole, "the page has come from NVMe")


def test_damaged_page_that_is_nowhere_else_is_computed_and_stored_anew(
    dram: Serving, start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    fill(start, tokens, 7, ranks=2)
    spoil(dram, tokens, block=3, rank=0)
    engine = start(ranks=2).ready()
    assert engine.serve(tokens) == 24
    engine.wait_stored(1)
    assert start(ranks=2).ready().serve(tokens) == 56


def test_page_is_verified_on_every_shard(dram: Serving, start: Start, prompt: Prompt) -> None:
    tokens = prompt(60)
    fill(start, tokens, 7, ranks=2)
    spoil(dram, tokens, block=3, rank=1)
    assert start(ranks=2).ready().serve(tokens) == 24


def test_nothing_is_promised_before_every_rank_can_load(
    start: Start, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(60)
    fill(start, tokens, 7, ranks=2)
    engine = start(ranks=2)
    monkeypatch.setattr(engine.worker, "_answer", lambda key: None)
    for _ in range(20):
        engine.forget_reusable()
        assert engine.serve(tokens) == 0
    monkeypatch.undo()
    engine.ready()
    engine.forget_reusable()
    assert engine.serve(tokens) == 56


def test_ranks_say_anew_that_they_are_ready_after_a_restart(
    serving: Serving, start: Start, prompt: Prompt
) -> None:
    tokens = prompt(60)
    engine = fill(start, tokens, 7, ranks=2)
    barrier = engine.scheduler._barrier
    before = barrier._complete_at
    serving.kill()
    serving.start()
    eventually(lambda: not barrier.complete(), "the scheduler sees another daemon")
    engine.ready()
    assert barrier._complete_at > before
    engine.forget_reusable()
    assert engine.serve(tokens) == 56


def test_block_of_which_the_engine_has_a_part_is_not_loaded(start: Start, prompt: Prompt) -> None:
    """It may be copying that part, on a stream of its own, when the load would write the block."""
    tokens = prompt(60)
    fill(start, tokens, 7)
    engine = start().ready()
    engine.executor.cache.local_match = lambda request: (3, [])  # type: ignore[method-assign]
    name = engine.submit(tokens)
    with pytest.raises(AssertionError, match="wrong KV"):
        engine.run()  # the model has no such tokens; what counts is what was promised
    assert engine.executor.matched[name] == 0
    assert engine.scheduler.counts["unaligned_lookups"] == 1


def test_pins_of_promised_pages_are_let_go_when_they_are_loaded(
    serving: Serving, start: Start, prompt: Prompt, environment: pytest.MonkeyPatch
) -> None:
    for load in ("sync", "async"):
        environment.setenv("TLLM_KVW_LOAD", load)
        tokens = prompt(60)
        fill(start, tokens, 7, ranks=2)
        engine = start(ranks=2).ready()
        assert engine.serve(tokens) == 56
        engine.serve(prompt(3))
        with serving.connect() as client:
            client.flush()
            client.evict(None, 1000)
            space = client.open(engine.scheduler.cache_info.spaces[0])
            assert (space.tiers(keys=first_keys(engine, tokens)) == kvw.Tier.NVME).all()


def test_pinned_hits_have_a_bound(
    start: Start, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_MOST_PINNED_HITS", 2)
    prompts = [prompt(30) for _ in range(4)]
    first = start(blocks=60).ready()
    for tokens in prompts:
        first.serve(tokens)
    first.wait_stored(12)
    second = start(blocks=60).ready()
    names = [second.submit(tokens) for tokens in prompts]
    second.run()
    assert sorted(second.executor.matched[name] for name in names) == [0, 0, 24, 24]


def test_lookup_begins_nothing_that_would_end_behind_its_time(
    start: Start, prompt: Prompt, environment: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page takes a second, by what is believed of it; the lookup has four and a half."""
    tokens = prompt(60)
    fill(start, tokens, 7)
    monkeypatch.setattr(verified_pages, "_BATCH_BYTES", 1)
    monkeypatch.setattr(verified_pages, "_BYTES_PER_S", page_of(tokens, 0, 0, 8).size)
    environment.setenv("TLLM_KVW_LOOKUP_BUDGET_S", "4.5")
    engine = start().ready()
    clock = Clock()
    load = verified_pages.VerifiedPages._load

    def one_second(self: verified_pages.VerifiedPages, *arguments: Any) -> int:
        clock.now_s += threading.current_thread() is threading.main_thread()
        return load(self, *arguments)

    monkeypatch.setattr(verified_pages.VerifiedPages, "_load", one_second)
    monkeypatch.setattr(verified_pages, "time", clock)
    monkeypatch.setattr(offers, "time", clock)
    assert engine.serve(tokens) == 4 * 8


class Clock:
    """Stands in for `time`."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def first_keys(engine: Engine, tokens: list[int]) -> list[bytes]:
    keys = PromptKeys(b"", engine.spec.block_tokens)
    keys.extend(tokens)
    return list(keys.keys(0, keys.count(1), 1))
