"""What the connector says of each request, for `kvwarehouse why --request`: over a real daemon."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import kvwarehouse as kvw
from kvwarehouse.client.why import NotedRequest
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.vllm import compat
from vllm_parts.halves import Engine
from vllm_parts.prompts import one_group, one_window, stored_prompt, two_sizes
from vllm_parts.requests import request, tokens


@pytest.fixture
def client(shared: Serving) -> Iterator[kvw.Client]:
    with shared.connect() as connected:
        yield connected


def run(engine: Engine, one: Any, blocks: int, local_tokens: int = 0, groups: int = 1) -> int:
    """As vLLM does: it says what it allocated also where nothing is loaded. Returns the tokens that
    are."""
    engine.scheduler.on_new_request(one)
    found, _ = engine.scheduler.matched(one, local_tokens)
    assert found is not None
    tables = [list(range(20 + 15 * group, 20 + 15 * group + blocks)) for group in range(groups)]
    engine.scheduler.allocated(one, tables, found)
    if found:
        engine.ended(one)
    return found


def noted(client: kvw.Client, request_id: str) -> NotedRequest:
    """Once the daemon has been told of it."""
    eventually(lambda: client.requests(request_id), f"a note of {request_id}")
    return client.requests(request_id)[0]


def figures(one: NotedRequest) -> tuple[int, int, int, int]:
    note = one.note
    return note.tokens, note.engine_tokens, note.found_tokens, note.load_tokens


def test_request_is_told_with_what_was_found_and_what_was_not(
    engine: Engine, client: kvw.Client, rng: random.Random
) -> None:
    ids, _ = stored_prompt(engine, rng)
    longer = request([*ids, *tokens(rng, 90)], name="longer")
    assert run(engine, longer, 15, 64) == 96
    one = noted(client, "longer")
    assert figures(one) == (250, 64, 160, 160)
    (part,) = one.missing
    assert [(run.first, run.pages, run.state) for run in part.runs] == [(10, 5, "unknown")]
    assert (part.page_tokens, part.branches.pages) == (16, 0)
    assert one.note.at_ns > 0


def test_prompt_that_is_found_whole_misses_nothing(
    engine: Engine, client: kvw.Client, rng: random.Random
) -> None:
    ids, _ = stored_prompt(engine, rng)
    assert run(engine, request([*ids, 7], name="whole"), 11) == 160
    one = noted(client, "whole")
    assert (figures(one), one.missing) == ((161, 0, 160, 160), ())


def test_page_that_left_and_one_that_differs_are_told_as_that(
    engine: Engine, client: kvw.Client, rng: random.Random
) -> None:
    ids, _ = stored_prompt(engine, rng)
    other = request([*ids[:100], *tokens(rng, 60)], name="differs")
    assert run(engine, other, 10) == 96
    (part,) = noted(client, "differs").missing
    assert (part.runs[0].state, part.branches.pages) == ("unknown", 1)
    space = client.requests("differs")[0].missing[0].namespace_id
    assert client.evict(space, 100_000, "all") >= 10
    again = request([*ids, 7], name="gone")
    assert run(engine, again, 11) == 0
    one = noted(client, "gone")
    assert figures(one) == (161, 0, 0, 0)
    (part,) = one.missing
    assert {(run.state, run.reason) for run in part.runs} == {("left", "operator")}
    assert part.runs[0].first == 0


def test_what_is_not_worth_loading_is_told_as_found(
    shared: Serving, client: kvw.Client, rng: random.Random
) -> None:
    with Engine(shared.address, one_group) as engine:
        ids, _ = stored_prompt(engine, rng)
    settings = {"load": "worth", "prefill_tokens_per_s": 1e9}
    with Engine(shared.address, one_group, settings) as engine:
        assert run(engine, request([*ids, 7], name="cheap"), 11) == 0
        assert figures(noted(client, "cheap")) == (161, 0, 160, 0)


def test_each_group_of_a_hybrid_model_is_told_for_itself(
    shared: Serving, client: kvw.Client, rng: random.Random
) -> None:
    with Engine(shared.address, two_sizes) as engine:
        one = request(tokens(rng, 160), name="hybrid")
        assert run(engine, one, 10, groups=2) == 0
        parts = noted(client, "hybrid").missing
        assert {part.page_tokens for part in parts} == {16, 32}
        assert {run.first for part in parts for run in part.runs} == {0}


def test_groups_without_a_chain_name_no_pages(
    shared: Serving, client: kvw.Client, rng: random.Random
) -> None:
    """They need the last ones of a prompt alone: none of them is the first that is missing."""
    with Engine(shared.address, one_window) as engine:
        assert run(engine, request(tokens(rng, 160), name="window"), 10) == 0
        assert noted(client, "window").missing == ()


def test_request_that_loads_nothing_by_its_own_wish_is_not_told(
    engine: Engine, client: kvw.Client, rng: random.Random
) -> None:
    wish = {"kvwarehouse.load": False}
    assert run(engine, request(tokens(rng, 64), name="alone", params=wish), 4) == 0
    assert run(engine, request(tokens(rng, 64), name="after"), 4) == 0
    noted(client, "after")
    assert client.requests("alone") == []


@pytest.mark.parametrize(
    ("own", "told"),
    [("cmpl-1-0-ab", "cmpl-1-0-ab"), ("1_cmpl-7", "cmpl-7_1"), ("12", "12"), ("x_1", "x_1")],
)
def test_id_begins_as_the_client_was_told(own: str, told: str) -> None:
    assert compat.request_name(own) == told
