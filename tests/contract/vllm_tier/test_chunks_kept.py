"""Chunks come back byte for byte, to those whose KV is the same, and to nobody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvwarehouse_bench.harness.serving import Serving
from kvwarehouse_connectors.vllm_tier.tier_core import LookupAnswer, RequestFacts
from vllm_tier_model.primary import EXTENTS, FACTS, ROW_BYTES, UNTOUCHED, keys

HERE, THERE = range(4), range(100, 104)


def test_chunks_come_back_byte_for_byte_to_the_next_engine(
    start: Any, shared: Serving, seed: int
) -> None:
    one, named = start(shared.address), keys(seed)
    source = one.fill(HERE, seed)
    one.core.begin("r", FACTS)
    assert one.lookup("r", named) == [LookupAnswer.MISS] * 4
    assert one.store("r", named, HERE)
    assert one.store("r", named, HERE), "it is there already"
    one.core.close()
    other = start(shared.address)
    other.core.begin("r", FACTS)
    assert other.lookup("r", named) == [LookupAnswer.HIT] * 4
    assert other.load("r", named, THERE) == [True] * 4
    assert other.contents(THERE) == source
    with shared.connect() as client:
        assert client.status()["core"]["pins"]["held"] == 0


def test_keys_come_in_any_order_and_rows_belong_to_them(
    start: Any, shared: Serving, seed: int
) -> None:
    """vLLM passes those of a store as a set."""
    primary, named = start(shared.address), keys(seed, count=16)
    source = primary.fill(range(16), seed)
    primary.core.begin("r", FACTS)
    mixed = np.random.default_rng(seed).permutation(16).tolist()
    assert primary.store("r", [named[i] for i in mixed], mixed)
    assert primary.load("r", named, range(100, 116)) == [True] * 16
    assert primary.contents(range(100, 116)) == source


def test_page_has_the_bytes_of_its_group_alone(start: Any, shared: Serving, seed: int) -> None:
    """A row holds, where its group has no layers, what the chunk before it left there: KV of other
    prompts, and of other users."""
    primary, named = start(shared.address), keys(seed, group=1)
    primary.fill(HERE, seed)
    primary.core.begin("r", FACTS)
    assert primary.store("r", named, HERE)
    assert primary.load("r", named, THERE) == [True] * 4
    assert primary.contents(THERE, group=1) == primary.contents(HERE, group=1)
    others = np.ones(ROW_BYTES, np.bool_)
    for offset, size in EXTENTS[1]:
        others[offset : offset + size] = False
    assert (primary.rows[THERE][:, others] == UNTOUCHED).all()


def test_groups_of_one_job_are_told_apart(start: Any, shared: Serving, seed: int) -> None:
    """Also where their block hashes are the same, as they are in vLLM."""
    primary = start(shared.address)
    named = [*keys(seed), *keys(seed, group=1)]
    primary.fill(range(8), seed)
    primary.core.begin("r", FACTS)
    assert primary.store("r", named, range(8))
    assert primary.load("r", named, range(100, 108)) == [True] * 8
    assert primary.contents(range(100, 104)) == primary.contents(range(4))
    assert primary.contents(range(104, 108), 1) == primary.contents(range(4, 8), 1)


def test_chunks_that_are_gone_are_told_key_by_key_and_the_others_come(
    start: Any, shared: Serving, seed: int
) -> None:
    primary, named = start(shared.address), keys(seed, count=9)
    there = [1, 2, 5, 7]
    source = primary.fill(range(9), seed)
    primary.core.begin("r", FACTS)
    assert primary.store("r", [named[i] for i in there], there)
    rows = range(100, 109)
    assert primary.load("r", named, rows) == [i in there for i in range(9)]
    assert [primary.contents(rows)[i] for i in there] == [source[i] for i in there]


@pytest.mark.parametrize(
    ("salt", "facts"),
    [("another", FACTS), (None, RequestFacts(twist=b"another adapter"))],
    ids=["salt", "adapter"],
)
def test_those_who_must_not_share_find_nothing(
    start: Any, shared: Serving, seed: int, salt: str | None, facts: RequestFacts
) -> None:
    primary, named = start(shared.address), keys(seed)
    primary.fill(HERE, seed)
    primary.core.begin("r", FACTS)
    assert primary.store("r", named, HERE)
    other = start(shared.address, **({"salt": salt} if salt else {}))
    other.core.begin("r", facts)
    assert other.lookup("r", named) == [LookupAnswer.MISS] * 4
    assert other.load("r", named, THERE) == [False] * 4


@pytest.mark.parametrize(
    ("facts", "loads", "stores"),
    [
        (RequestFacts(loads=False), False, True),
        (RequestFacts(stores=False), True, False),
        (RequestFacts(loads=False, stores=False), False, False),
    ],
)
def test_request_does_not_load_or_store_what_it_must_not(
    start: Any, shared: Serving, seed: int, facts: RequestFacts, loads: bool, stores: bool
) -> None:
    primary, old, new = start(shared.address), keys(seed), keys(seed, "new")
    primary.fill(HERE, seed)
    primary.core.begin("before", FACTS)
    assert primary.store("before", old, HERE)
    primary.core.begin("r", facts)
    assert primary.found("r", old) == [loads] * 4
    assert primary.load("r", old, THERE) == [loads] * 4
    assert primary.store("r", new, HERE) == stores
    assert primary.found("before", new) == [stores] * 4


@pytest.mark.parametrize(("mode", "loads", "stores"), [("read_only", 1, 0), ("write_only", 0, 1)])
def test_mode_bounds_what_the_tier_does(
    start: Any, shared: Serving, seed: int, mode: str, loads: int, stores: int
) -> None:
    primary, old, new = start(shared.address), keys(seed), keys(seed, "new")
    primary.fill(HERE, seed)
    primary.core.begin("r", FACTS)
    assert primary.store("r", old, HERE)
    bound = start(shared.address, mode=mode)
    bound.core.begin("r", FACTS)
    assert bound.found("r", old) == [bool(loads)] * 4
    assert bound.store("r", new, HERE) == bool(stores)


def test_nothing_is_served_before_the_workers_have_told_their_rows(
    start: Any, shared: Serving, seed: int
) -> None:
    primary, named = start(shared.address), keys(seed)
    told, primary.core._groups = primary.core._groups, {}
    primary.core.begin("r", FACTS)
    assert primary.lookup("r", named) == [LookupAnswer.MISS] * 4
    assert not primary.store("r", named, HERE)
    assert primary.load("r", named, THERE) == [False] * 4
    primary.core._groups = told
    assert primary.store("r", named, HERE)
