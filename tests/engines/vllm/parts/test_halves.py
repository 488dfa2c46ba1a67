"""Both halves of the connector over a real daemon, with the test in the place of the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from vllm_parts.halves import Engine, engine_config, same
from vllm_parts.requests import adapter, request, tokens
from vllm_parts.specs import full, group, window

import kvwarehouse as kvw
import kvwarehouse_connectors.vllm.scheduler as scheduler_module
from kvwarehouse.testing.serving import Serving
from kvwarehouse.testing.until import until
from kvwarehouse_connectors.vllm.messages import PageRun
from kvwarehouse_connectors.vllm.scheduler import SchedulerSide
from kvwarehouse_connectors.vllm.settings import read_settings


def one_group() -> list[Any]:
    return [group(full(16), "a", "b")]


def one_window() -> list[Any]:
    return [group(window(16, 64), "a", "b")]


def two_groups() -> list[Any]:
    return [group(full(16), "a", "b"), group(window(16, 40), "c", "d")]


def two_sizes() -> list[Any]:
    return [group(full(16), "a"), group(full(32, heads=1), "b")]


def one_layer() -> list[Any]:
    return [group(full(16), "a")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("disk"), dram="64MiB") as serving:
        yield serving


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """For tests that do things to it."""
    with Serving(tmp_path, dram="64MiB") as serving:
        yield serving


@pytest.fixture
def engine(shared: Serving) -> Iterator[Engine]:
    with Engine(shared.address, one_group) as engine:
        yield engine


def stored_prompt(
    engine: Engine, rng: random.Random, count: int = 160, **options: Any
) -> tuple[list[int], list[Any]]:
    """A prompt that the engine computed and stored in blocks 1 and on of its first group; its
    tokens, and what the blocks held."""
    ids = tokens(rng, count)
    blocks = list(range(1, count // 16 + 1))
    content = engine.fill(blocks)
    first = request(ids, name="first", **options)
    engine.scheduler.on_new_request(first)
    engine.compute(first, [blocks], count)
    engine.stored(request([*ids, 1], name="asks", **options), count)
    return ids, content


def test_what_one_request_computed_another_loads_bit_for_bit(
    engine: Engine, rng: random.Random
) -> None:
    ids, content = stored_prompt(engine, rng)
    blocks = list(range(30, 40))
    assert not same(engine.pages(blocks), content)
    assert engine.load(request([*ids, 7], name="second"), [blocks]) == 160
    assert same(engine.pages(blocks), content)
    assert engine.bad_blocks == engine.failed == set()


def test_a_prompt_of_whole_blocks_is_promised_whole_in_full_attention(
    engine: Engine, rng: random.Random
) -> None:
    """vLLM then computes its last token alone, over KV that is there."""
    ids, _ = stored_prompt(engine, rng)
    assert engine.promised(request(ids)) == 160
    assert engine.promised(request(ids[:145])) == 144
    assert engine.promised(request(ids[:144])) == 144
    assert engine.promised(request(ids[:143])) == 128


def test_a_block_is_left_to_compute_where_the_last_token_cannot_be_computed_again(
    shared: Serving, rng: random.Random
) -> None:
    """Its window may begin a block earlier than the next token's."""
    with Engine(shared.address, one_window) as engine:
        ids = tokens(rng, 160)
        first = request(ids, name="first")
        engine.scheduler.on_new_request(first)
        engine.compute(first, [list(range(1, 11))], 160)
        engine.stored(request([*ids, 1], name="asks"), 160)
        assert engine.promised(request(ids)) == 144
        assert engine.promised(request([*ids, 1])) == 160


def test_what_the_engine_has_itself_is_not_loaded(engine: Engine, rng: random.Random) -> None:
    ids, content = stored_prompt(engine, rng)
    mine = list(range(20, 24))
    before = engine.pages(mine)
    blocks = [*mine, *range(30, 36)]
    assert engine.load(request([*ids, 7], name="second"), [blocks], local_tokens=64) == 96
    assert same(engine.pages(mine), before)
    assert same(engine.pages(blocks[4:]), [pages[4:] for pages in content])


def test_another_salt_adapter_or_wish_loads_nothing(engine: Engine, rng: random.Random) -> None:
    ids, _ = stored_prompt(engine, rng)
    again = [*ids, 7]
    assert engine.promised(request(again)) == 160
    assert engine.promised(request(again, cache_salt="x")) == 0
    assert engine.promised(request(again, lora_request=adapter("/absent"))) == 0
    assert engine.promised(request(again, params={"kvwarehouse.load": False})) == 0
    assert engine.promised(request(again, params={"kvwarehouse.store": False})) == 160
    one = request(again)
    one.skip_reading_prefix_cache = True
    assert engine.promised(one) == 0


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"params": {"kvwarehouse.store": False}}, {}),
        ({"lora_request": adapter("/absent")}, {}),
        ({}, {"mode": "read_only"}),
    ],
)
def test_who_may_not_store_orders_no_store(
    options: dict[str, Any], settings: dict[str, Any], shared: Serving, rng: random.Random
) -> None:
    with Engine(shared.address, one_group, settings) as engine:
        one = request(tokens(rng, 160), **options)
        engine.scheduler.on_new_request(one)
        engine.compute(one, [list(range(1, 11))], 160)
        assert engine.workers[0].stats() is None
        assert engine.workers[0]._outbox._ring.used_bytes == 0


def test_engines_share_what_they_store_and_a_salted_one_does_not(
    shared: Serving, rng: random.Random
) -> None:
    with (
        Engine(shared.address, one_group) as one,
        Engine(shared.address, one_group) as other,
        Engine(shared.address, one_group, {"salt": "tenant"}) as apart,
        Engine(shared.address, one_group, {"weights": "others"}) as different,
    ):
        ids, content = stored_prompt(one, rng)
        blocks = list(range(30, 40))
        assert other.load(request([*ids, 7]), [blocks]) == 160
        assert same(other.pages(blocks), content)
        assert apart.promised(request([*ids, 7])) == 0
        assert different.promised(request([*ids, 7])) == 0


def test_ranks_store_and_load_each_its_own_shard(shared: Serving, rng: random.Random) -> None:
    with Engine(shared.address, one_group, ranks=2) as engine:
        ids, content = stored_prompt(engine, rng)
        assert not same(content[:1], content[1:])
        blocks = list(range(30, 40))
        assert engine.load(request([*ids, 7]), [blocks]) == 160
        assert same(engine.pages(blocks), content)
        assert engine.received


def test_page_is_not_promised_before_every_rank_has_stored_it(
    shared: Serving, rng: random.Random
) -> None:
    with Engine(shared.address, one_group, ranks=2) as engine:
        ids = tokens(rng, 160)
        engine.fill(range(1, 11))
        one = request(ids)
        engine.scheduler.on_new_request(one)
        silent = engine.workers[1]
        silent._stores = False
        engine.compute(one, [list(range(1, 11))], 160)
        until(lambda: engine.workers[0].stats(), "the first rank has stored")
        assert engine.promised(request([*ids, 7])) == 0


def test_ranks_that_differ_are_refused(shared: Serving) -> None:
    with Engine(shared.address, one_group) as engine, Engine(shared.address, one_layer) as other:
        facts = {0: engine.workers[0].facts(), 1: other.workers[0].facts()}
        with pytest.raises(kvw.UsageError, match="caches of 2 kinds"):
            engine.scheduler.set_facts(facts)  # type: ignore[arg-type]


# -- loads that fail -------------------------------------------------------------------------------


def cut_loads(engine: Engine, pages: int) -> None:
    """From now on a load brings so many blocks and no more."""
    for memory in engine.workers[0]._memories:
        real = memory.load

        def cut(space: Any, run: PageRun, begin: int, shard: int, timeout_s: float, real=real):  # type: ignore[no-untyped-def]
            loaded = min(int(real(space, run, begin, shard, timeout_s)), pages)
            return kvw.Loaded(loaded, {"absent": len(run.blocks) - begin - loaded})

        memory.load = cut  # type: ignore[method-assign]


def test_blocks_that_did_not_come_are_reported_and_those_before_them_are_kept(
    engine: Engine, rng: random.Random
) -> None:
    ids, content = stored_prompt(engine, rng)
    cut_loads(engine, 4)
    blocks = list(range(30, 40))
    one = request([*ids, 7], name="second")
    assert engine.load(one, [blocks]) == 160
    assert engine.bad_blocks == set(blocks[4:])
    assert engine.failed == set()
    assert same(engine.pages(blocks[:4]), [pages[:4] for pages in content])


def test_request_whose_load_failed_loads_nothing_more_and_others_do(
    engine: Engine, rng: random.Random
) -> None:
    """It may not ask again and again for what does not come."""
    ids, _ = stored_prompt(engine, rng)
    cut_loads(engine, 0)
    one = request([*ids, 7], name="second")
    engine.load(one, [list(range(30, 40))])
    assert engine.scheduler.matched(one, 0) == (0, False)
    assert engine.promised(request([*ids, 7], name="third")) == 160


def test_request_of_several_groups_fails_as_a_whole(shared: Serving, rng: random.Random) -> None:
    """Block ids say nothing where groups have tables of their own; vLLM ends on them."""
    with Engine(shared.address, two_groups) as engine:
        ids = tokens(rng, 160)
        first = request(ids, name="first")
        engine.scheduler.on_new_request(first)
        engine.compute(first, [list(range(1, 11)), list(range(11, 21))], 160)
        engine.stored(request([*ids, 1], name="asks"), 160)
        cut_loads(engine, 1)
        tables = [list(range(30, 40)), [0] * 7 + [40, 41, 42]]
        engine.load(request([*ids, 7], name="second"), tables)
        assert engine.failed == {"second"}
        assert engine.bad_blocks == set()


def test_window_of_which_a_block_did_not_come_fails_as_a_whole(
    shared: Serving, rng: random.Random
) -> None:
    """vLLM cuts the computed tokens at the first bad block and computes on from there. In front of
    it a window has blocks that were never loaded: the answer would be a wrong one."""
    with Engine(shared.address, one_window) as engine:
        ids = tokens(rng, 160)
        first = request(ids, name="first")
        engine.scheduler.on_new_request(first)
        engine.compute(first, [list(range(1, 11))], 160)
        engine.stored(request([*ids, 1], name="asks"), 160)
        cut_loads(engine, 2)
        engine.load(request([*ids, 7], name="second"), [[0] * 6 + [40, 41, 42, 43]])
        assert engine.failed == {"second"}
        assert engine.bad_blocks == set()


def test_load_of_evicted_pages_is_reported(serving: Serving, rng: random.Random) -> None:
    with Engine(serving.address, one_group) as engine, serving.connect() as client:
        ids, _ = stored_prompt(engine, rng)
        one = request([*ids, 7], name="second")
        engine.scheduler.on_new_request(one)
        promised, _ = engine.scheduler.matched(one, 0)
        assert promised == 160
        client.clear(None)
        blocks = list(range(30, 40))
        engine.scheduler.allocated(one, [blocks], 160)
        engine.ended(one)
        assert engine.bad_blocks == set(blocks)


@pytest.mark.parametrize("asked", [0, 32, 160])
def test_load_that_was_never_found_is_refused_for_the_engine_waits_for_it(
    asked: int, engine: Engine, rng: random.Random
) -> None:
    one = request(tokens(rng, 161), name="second")
    engine.scheduler.on_new_request(one)
    blocks = list(range(30, 40))
    engine.scheduler.allocated(one, [blocks], asked)
    if asked:
        engine.ended(one)
    assert engine.failed == ({"second"} if asked else set())


def test_whatever_a_loading_thread_meets_is_reported(engine: Engine, rng: random.Random) -> None:
    ids, _ = stored_prompt(engine, rng)

    def fail(*arguments: Any) -> kvw.Loaded:
        raise RuntimeError("odd")

    engine.workers[0]._memories[0].load = fail  # type: ignore[method-assign]
    blocks = list(range(30, 40))
    engine.load(request([*ids, 7], name="second"), [blocks])
    assert engine.bad_blocks == set(blocks)


def held(client: kvw.Client) -> int:
    """Pins, of all sessions."""
    return int(client.status()["core"]["pins"]["held"])


def test_request_that_ends_while_it_loads_gives_its_pins_back(
    serving: Serving, rng: random.Random
) -> None:
    with Engine(serving.address, one_group) as engine, serving.connect() as client:
        ids, _ = stored_prompt(engine, rng)

        one = request([*ids, 7], name="second")
        engine.scheduler.on_new_request(one)
        promised, _ = engine.scheduler.matched(one, 0)
        assert held(client) == 10
        engine.scheduler.allocated(one, [list(range(30, 40))], promised or 0)
        engine.scheduler.finished(one)
        assert held(client) == 10, "a load under way was let go"
        engine.ended(one)
        assert held(client) == 0


def test_hits_that_are_not_loaded_after_all_give_their_pins_back(
    serving: Serving, rng: random.Random
) -> None:
    with Engine(serving.address, one_group) as engine, serving.connect() as client:
        ids, _ = stored_prompt(engine, rng)

        one = request([*ids, 7], name="second")
        engine.scheduler.on_new_request(one)
        for _ in range(20):
            assert engine.scheduler.matched(one, 0) == (160, True)
        assert held(client) == 10
        assert engine.scheduler.matched(one, 32) == (128, True)
        assert held(client) == 8
        engine.scheduler.allocated(one, [list(range(30, 40))], 0)
        assert held(client) == 0


# -- daemons that come and go ----------------------------------------------------------------------


def test_engine_without_a_daemon_computes_and_shares_once_there_is_one(
    tmp_path: Path, rng: random.Random
) -> None:
    serving = Serving(tmp_path, dram="64MiB")
    try:
        with Engine(serving.address, one_group) as engine:
            one = request(tokens(rng, 160), name="first")
            engine.scheduler.on_new_request(one)
            assert engine.scheduler.matched(one, 0) == (0, False)
            engine.compute(one, [list(range(1, 11))], 160)
            engine.scheduler.finished(one)
            serving.start()
            until(lambda: engine.scheduler._finder() is not None, "the daemon is found")
            until(lambda: engine.workers[0]._upkeep.control(), "the worker has found it too")
            stored_prompt(engine, rng)
    finally:
        serving.remove()


def test_pages_in_dram_are_loaded_from_a_daemon_that_was_killed(
    serving: Serving, rng: random.Random
) -> None:
    with Engine(serving.address, one_group) as engine:
        ids, content = stored_prompt(engine, rng)
        serving.kill()
        until(lambda: engine.scheduler._upkeep.control() is None, "its end is seen")
        blocks = list(range(30, 40))
        assert engine.load(request([*ids, 7], name="second"), [blocks]) == 160
        assert same(engine.pages(blocks), content)


def test_stores_are_dropped_and_counted_while_there_is_no_daemon(
    serving: Serving, rng: random.Random
) -> None:
    with Engine(serving.address, one_group) as engine:
        stored_prompt(engine, rng)
        engine.workers[0].stats()
        serving.kill()
        until(lambda: engine.workers[0]._upkeep.control() is None, "its end is seen")
        one = request(tokens(rng, 160), name="third")
        engine.scheduler.on_new_request(one)
        engine.compute(one, [list(range(1, 11))], 160)
        stats = until(engine.workers[0].stats, "it is counted")
        assert stats.data["dropped_blocks"] == 10
        assert stats.data["stored_blocks"] == 0
        until(lambda: not engine.workers[0]._outbox._ring.used_bytes, "the room is given back")


# -- resets ----------------------------------------------------------------------------------------


def test_after_a_reset_nothing_older_is_loaded_and_nobody_else_loads_what_follows(
    shared: Serving, rng: random.Random
) -> None:
    with Engine(shared.address, one_group) as engine, Engine(shared.address, one_group) as other:
        ids, _ = stored_prompt(engine, rng)
        older = request(tokens(rng, 160), name="older")
        engine.scheduler.on_new_request(older)
        engine.scheduler.reset()
        assert engine.promised(request([*ids, 7], name="later")) == 0
        engine.compute(older, [list(range(1, 11))], 160)
        engine.step()
        assert engine.promised(request([*older.all_token_ids, 7], name="later")) == 0
        assert other.promised(request([*ids, 7], name="later")) == 160
        fresh, content = stored_prompt(engine, rng)
        blocks = list(range(30, 40))
        assert engine.load(request([*fresh, 7], name="again"), [blocks]) == 160
        assert same(engine.pages(blocks), content)
        assert other.promised(request([*fresh, 7], name="later")) == 0


# -- hand-off --------------------------------------------------------------------------------------


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


# -- refused at the start --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2), "pipeline"),
        (lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2), "context"),
        (lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2), "context"),
        (lambda c: setattr(c.model_config, "is_encoder_decoder", True), "encoder-decoder"),
        (lambda c: setattr(c.load_config, "load_format", "dummy"), "dummy"),
        (lambda c: setattr(c.model_config, "model", "no/such-model"), "no/such-model"),
    ],
)
def test_engine_that_cannot_be_served_is_refused_by_name(
    change: Callable[[Any], None], words: str, engine: Engine
) -> None:
    config = engine_config(["a", "b"], revision=None)
    config.load_config.download_dir = None
    change(config)
    with pytest.raises(kvw.UsageError, match=words):
        SchedulerSide(config, engine.caches[0].config, read_settings({}, "kv_both"))
