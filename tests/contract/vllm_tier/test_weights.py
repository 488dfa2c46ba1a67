"""Weights that may change in the running engine: a job counts from when they are known to have been
right up to its step, and not at all where they were others."""

from __future__ import annotations

from typing import Any

import pytest

from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.vllm_tier.tier_core import LookupAnswer
from vllm_tier_model.primary import FACTS, keys

HERE, THERE = range(4), range(100, 104)


def test_store_begins_and_load_is_reported_when_the_weights_are_known(
    start: Any, shared: Serving, seed: int
) -> None:
    primary, named = start(shared.address), keys(seed)
    source = primary.fill(HERE, seed)
    primary.core.begin("r", FACTS)
    primary.step = 1
    store = primary.begin_store("r", named, HERE)
    primary.poll()
    assert primary.lookup("r", named) == [LookupAnswer.MISS] * 4
    assert store not in primary.reported
    primary.known = 1
    assert primary.ended(store).complete
    primary.step = 2
    load = primary.begin_load("r", named, THERE)
    eventually(lambda: primary.contents(THERE) == source, "chunks in their rows")
    primary.poll()
    assert load not in primary.reported, "vLLM would let requests read it"
    primary.known = 2
    assert primary.ended(load).complete


def test_jobs_under_way_when_the_weights_are_others_fail(
    start: Any, shared: Serving, seed: int
) -> None:
    primary, named, new = start(shared.address), keys(seed), keys(seed, "new")
    primary.fill(HERE, seed)
    primary.core.begin("r", FACTS)
    assert primary.store("r", named, HERE)
    primary.step = 1
    load = primary.begin_load("r", named, THERE)
    store = primary.begin_store("r", new, HERE)
    primary.core.forget()
    primary.known = 1
    assert not primary.ended(load).done
    assert not primary.ended(store).done
    assert primary.core.totals["missed.other_weights"] == 4
    assert primary.core.totals["dropped.other_weights"] == 4
    assert primary.lookup("r", named) == [LookupAnswer.MISS] * 4, "it began before"
    primary.core.begin("after", FACTS)
    assert primary.lookup("after", named) == [LookupAnswer.MISS] * 4, "under other keys"
    other = start(shared.address)
    other.core.begin("r", FACTS)
    assert other.lookup("r", [*named, *new]) == [LookupAnswer.HIT] * 4 + [LookupAnswer.MISS] * 4


@pytest.mark.parametrize("kind", ["load", "store"])
def test_job_of_which_nothing_becomes_known_fails_in_its_time(
    start: Any, shared: Serving, seed: int, kind: str
) -> None:
    """Such as where a worker has died: vLLM's requests wait for it."""
    primary = start(shared.address, load_timeout_s=0.5, store_timeout_s=0.5)
    named = keys(seed)
    primary.fill(HERE, seed)
    primary.core.begin("r", FACTS)
    eventually(lambda: primary.store("r", named, HERE), "a store within its time")
    primary.step = 1
    begin = primary.begin_load if kind == "load" else primary.begin_store
    assert not primary.ended(begin("r", named, THERE)).done


@pytest.mark.parametrize("taken", [True, False], ids=["", "that vLLM has not asked for"])
@pytest.mark.parametrize("end", ["drain", "close"])
def test_no_job_is_left_open(start: Any, shared: Serving, seed: int, end: str, taken: bool) -> None:
    primary, named = start(shared.address), keys(seed)
    source = primary.fill(HERE, seed)
    primary.core.begin("r", FACTS)
    assert primary.store("r", named, HERE)
    primary.step = 1
    load = primary.begin_load("r", named, THERE)
    eventually(lambda: primary.contents(THERE) == source, "chunks in their rows")
    store = primary.begin_store("r", keys(seed, "new"), HERE)
    if taken:
        primary.poll()
    getattr(primary.core, end)()
    primary.poll()
    assert {load, store} <= set(primary.reported)
    assert not primary.reported[load].done
    assert not primary.reported[store].done
    with shared.connect() as client:
        assert client.status()["core"]["pins"]["held"] == 0
