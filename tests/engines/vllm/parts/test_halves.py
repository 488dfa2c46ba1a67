"""What one engine stores another loads, and who does not; over a real daemon, with the test in the
place of the engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.core.prefix_matcher import page_run
from vllm_parts.halves import Engine, same
from vllm_parts.prompts import one_group, one_layer, one_window, stored_prompt
from vllm_parts.requests import adapter, request, tokens


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
        engine.begin(one)
        engine.compute(one, [list(range(1, 11))], 160)
        assert engine.workers[0].stats() is None
        assert engine.workers[0]._store_queue._ring.used_bytes == 0


def test_request_that_ends_a_conversation_stores_nothing_and_releases_what_others_stored(
    shared: Serving, rng: random.Random
) -> None:
    with Engine(shared.address, one_group) as engine, shared.connect() as client:
        ids, _ = stored_prompt(engine, rng)
        before = client.status()["core"]["released_pages"]
        last = request([*ids, *tokens(rng, 64)], name="last", params={"kvwarehouse.release": True})
        blocks = list(range(20, 34))
        assert engine.load(last, [blocks]) == 160
        last.num_computed_tokens = 160
        engine.compute(last, [blocks], 64)
        assert engine.workers[0]._store_queue._ring.used_bytes == 0
        engine.scheduler.finished(last)
        stats = engine.scheduler.step_ends()
        assert stats is not None
        assert stats.data["released_blocks"] == 10
        eventually(
            lambda: client.status()["core"]["released_pages"] == before + 10,
            "the daemon hears of it",
        )
        assert engine.promised(request([*ids, 7], name="again")) == 160  # while there is room


def test_what_a_request_leaves_out_is_counted_on_every_rank(
    shared: Serving, rng: random.Random
) -> None:
    """A prefill node: a prompt in one step, and an end after one token."""
    with Engine(shared.address, one_group, ranks=2) as engine:
        planner = engine.scheduler._planner
        assert planner is not None
        planner._step_bytes = 4 * planner._page_bytes[0]
        one = request(tokens(rng, 160))
        engine.scheduler.on_new_request(one)
        engine.compute(one, [list(range(1, 11))], 160)
        engine.scheduler.finished(one)
        stats = engine.scheduler.step_ends()
        assert stats is not None
        assert stats.data["dropped_blocks"] == 2 * 6


@pytest.mark.parametrize("ranks", [1, 2])
def test_store_in_part_announces_what_is_there_and_nothing_else(
    ranks: int, shared: Serving, rng: random.Random
) -> None:
    """One page of a step was refused, and routers never heard of any of that step."""
    with Engine(shared.address, one_group, ranks=ranks) as engine:
        ids, _ = stored_prompt(engine, rng)
        longer = request([*ids, *tokens(rng, 32)], name="longer")
        engine.scheduler.on_new_request(longer)
        keys = engine.scheduler._requests["longer"].keys
        worker = engine.workers[0]
        run = page_run(0, worker._groups[0], keys, range(12), list(range(1, 13)))
        worker._wants_events = True
        worker._stored([run], kvw.StoreResult(9, 1, {"no_room": 2}))
        told = worker.step_results()
        assert told is not None
        assert told.stored == {(0, key): ranks for key in run.keys[:10]}


def test_windows_are_released_too(shared: Serving, rng: random.Random) -> None:
    with Engine(shared.address, one_window) as engine:
        ids, _ = stored_prompt(engine, rng)
        last = request([*ids, 7], name="last", params={"kvwarehouse.release": True})
        engine.scheduler.on_new_request(last)
        engine.scheduler.finished(last)
        stats = engine.scheduler.step_ends()
        assert stats is not None
        assert stats.data["released_blocks"] > 0


def test_what_a_request_wishes_to_be_kept_stays_by_its_name(
    shared: Serving, rng: random.Random
) -> None:
    with Engine(shared.address, one_group) as engine, shared.connect() as client:
        counted = counts_of(engine)
        wish = {"kvwarehouse.keep_s": 600, "kvwarehouse.keep_as": "session"}
        ids, _ = stored_prompt(engine, rng)
        ended(engine, ids, name="turn-1", params=wish)
        kept = kept_as(client, "request:session")
        assert (kept.pages, kept.ttl_s, kept.renewed) == (10, 600, False)
        # The next turn has what the first one has, and more: it takes its place.
        longer = request([*ids, *tokens(rng, 32)], name="turn-2", params=wish)
        blocks = list(range(20, 32))
        assert engine.load(longer, [blocks]) == 160
        longer.num_computed_tokens = 160
        engine.compute(longer, [blocks], 32)
        engine.scheduler.finished(longer)
        eventually(lambda: kept_as(client, "request:session").pages == 12, "the longer one is kept")
        assert len(client.keeps().keeps) == 1
        # A step may have taken the first turn's 10.
        eventually(lambda: counted("kept_blocks") in (12, 22), "they are counted")
        assert client.remove_all_keeps() == 1


def test_windows_are_kept_as_far_as_an_end_needs_them(shared: Serving, rng: random.Random) -> None:
    with Engine(shared.address, one_window) as engine, shared.connect() as client:
        ids, _ = stored_prompt(engine, rng)
        ended(engine, ids, name="window", params={"kvwarehouse.keep_s": 600})
        kept = kept_as(client, "request:window")
        group = engine.scheduler._groups[0]
        assert kept.pages == 160 // group.block_tokens - group.first_needed(160)
        assert client.remove_keep("request:window") == 1


def test_wish_that_has_no_room_is_counted_and_harms_nothing(
    tmp_path: Path, rng: random.Random
) -> None:
    with (
        Serving(tmp_path, keep_percent=0) as own,
        Engine(own.address, one_group) as engine,
        own.connect() as client,
    ):
        ids, _ = stored_prompt(engine, rng)
        ended(engine, ids, name="refused", params={"kvwarehouse.keep_s": 600})
        counted = counts_of(engine)
        eventually(lambda: counted("keep_failures") == 1, "it is refused")
        assert client.keeps().keeps == ()


def ended(engine: Engine, ids: list[int], **options: Any) -> None:
    """A request for a prompt, from its begin to its end."""
    one = request(ids, **options)
    engine.scheduler.on_new_request(one)
    one.num_computed_tokens = len(ids)
    engine.scheduler.finished(one)


def kept_as(client: kvw.Client, name: str) -> Any:
    def found() -> list[Any]:
        return [each for each in client.keeps().keeps if each.name == name]

    eventually(lambda: bool(found()), f"{name} is kept")
    return found()[0]


def counts_of(engine: Engine) -> Callable[[str], int]:
    """Of a counter, from now on."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> int:
        stats = engine.scheduler.step_ends()
        counts.update({} if stats is None else stats.data)
        return counts[name]

    return counted


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
        eventually(lambda: engine.workers[0].stats(), "the first rank has stored")
        assert engine.promised(request([*ids, 7])) == 0


def test_ranks_that_differ_are_refused(shared: Serving) -> None:
    with Engine(shared.address, one_group) as engine, Engine(shared.address, one_layer) as other:
        by_rank = {(0, 0): engine.workers[0].cache_info(), (0, 1): other.workers[0].cache_info()}
        with pytest.raises(kvw.UsageError, match="caches of 2 kinds"):
            engine.scheduler.set_cache_info(by_rank)  # type: ignore[arg-type]


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
