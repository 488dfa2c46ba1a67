"""The longest prefix that all groups of a model have, against a search through all of them, over a
real daemon."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.core.prefix_matcher import (
    PrefixHit,
    PrefixMatcher,
    consecutive,
    load_runs,
)
from kvwarehouse_connectors.vllm.cache_layout import cache_groups
from kvwarehouse_connectors.vllm.keys import RequestKeys, chain_for
from vllm_parts.requests import request, tokens
from vllm_parts.spaces import PAGE_BYTES, content, open_all, store
from vllm_parts.specs import chunk, config, full, state, window

HASH = 16
MODELS = {
    "full": config(full(16), hash_tokens=HASH),
    "window": config(window(16, 100), hash_tokens=HASH),
    "full and window": config(full(16), window(16, 100), hash_tokens=HASH),
    "blocks of two sizes": config(window(16, 40), full(32), hash_tokens=HASH),
    "full and chunks": config(full(16), chunk(16, 96), hash_tokens=HASH),
    "full and states": config(state(48), full(16), hash_tokens=HASH),
    "states alone": config(state(32), hash_tokens=HASH),
    "two full": config(full(16), full(32), hash_tokens=HASH),
    "everything": config(
        window(16, 70), state(48), full(16), chunk(16, 64), window(32, 200), hash_tokens=HASH
    ),
}
GROUPS = {name: cache_groups(made) for name, made in MODELS.items()}


@pytest.fixture(scope="module")
def client() -> Iterator[kvw.Client]:
    with kvw.embedded(dram="128MiB") as client:
        yield client


@dataclass
class Prompt:
    """A prompt of which in each group some blocks are stored."""

    groups: tuple[CacheGroup, ...]
    opened: list[kvw.OpenNamespace]
    keys: RequestKeys
    stored: list[set[int]]

    @property
    def align(self) -> int:
        return lcm(*(group.block_tokens for group in self.groups))

    @property
    def matcher(self) -> PrefixMatcher:
        return PrefixMatcher(self.groups, self.opened, self.align)

    def needed(self, place: int, local: int, end: int) -> range:
        """Blocks that have to be loaded to go on after `end` tokens, of which `local` are there."""
        group = self.groups[place]
        first = 0 if group.chained else group.first_needed(end)
        return range(max(first, local // group.block_tokens), end // group.block_tokens)

    def longest(self, local: int, limit: int) -> int:
        """The largest end at which nothing is missing; local where there is none."""
        counts = [self.keys.count(group.block_hashes) for group in self.groups]
        known = min(
            count * group.block_tokens for count, group in zip(counts, self.groups, strict=True)
        )
        for end in range(min(limit, known) // self.align * self.align, local, -self.align):
            if all(
                set(self.needed(place, local, end)) <= self.stored[place]
                for place in range(len(self.groups))
            ):
                return end
        return local


def prompt(
    client: kvw.Client, model: str, chance: int, *, stored: Sequence[set[int]] | None = None
) -> Prompt:
    """stored: blocks by group, of a long prompt; else what the chance gives: of full attention a
    beginning, of others whatever."""
    rng = random.Random(chance)
    groups = GROUPS[model]
    client.clear(all=True)
    opened = open_all(client, groups)
    length = rng.randrange(0, 1900) if stored is None else 1900
    one = request(tokens(rng, length), hash_tokens=HASH)
    twist = rng.choice([b"", b"twist"])
    keys = RequestKeys(one, chain_for("sha256", HASH)(), twist)
    have: list[set[int]] = []
    for place, group in enumerate(groups):
        count = keys.count(group.block_hashes)
        if stored is not None:
            blocks = sorted(block for block in stored[place] if block < count)
        elif group.chained:
            blocks = list(range(rng.choice([count, rng.randint(0, count)])))
        else:
            share = rng.choice([0.3, 0.9, 0.97, 1.0])
            blocks = [block for block in range(count) if rng.random() < share]
        store(opened[place], place, group, keys, blocks)
        have.append(set(blocks))
    return Prompt(groups, opened, keys, have)


@settings(max_examples=40)
@given(
    model=st.sampled_from(sorted(MODELS)),
    chance=st.integers(0, 1 << 32),
    local=st.integers(0, 1900),
    limit=st.integers(0, 2000),
)
def test_found_prefix_is_the_longest_that_every_group_has(
    client: kvw.Client, model: str, chance: int, local: int, limit: int
) -> None:
    one = prompt(client, model, chance)
    local = min(local, limit) // one.align * one.align
    for local_tokens in {0, local}:
        hit = one.matcher.find(one.keys, local_tokens, limit)
        found = hit.tokens if hit is not None else local_tokens
        assert found == one.longest(local_tokens, limit)
        if hit is not None:
            check(one, hit, local_tokens)


def check(one: Prompt, hit: PrefixHit, local: int) -> None:
    """The spans are exactly what is needed, in DRAM."""
    assert hit.local_tokens == local
    spans = {span.place: span for span in hit.groups}
    assert len(spans) == len(hit.groups) == len(one.groups)
    for place in range(len(one.groups)):
        needed = one.needed(place, local, hit.tokens)
        assert range(spans[place].begin, spans[place].end) == needed
        assert (spans[place].tiers == kvw.Tier.DRAM).all()
        assert len(spans[place].tiers) == len(needed)
    assert hit.dram_share == 1.0


@settings(max_examples=25)
@given(model=st.sampled_from(sorted(MODELS)), chance=st.integers(0, 1 << 32))
def test_found_prefix_is_loaded_into_the_blocks_of_the_tables(
    client: kvw.Client, model: str, chance: int
) -> None:
    """Tables as vLLM makes them: blocks before a window are 0, and nothing is loaded for them."""
    one = prompt(client, model, chance)
    hit = one.matcher.find(one.keys, 0, 2000)
    if hit is None:
        return
    tables: list[list[int]] = [[] for _ in one.groups]
    for group in one.groups:
        count = hit.tokens // group.block_tokens
        first = group.first_needed(hit.tokens)
        tables[group.index] = [
            1000 * (group.index + 1) + block if block >= first else 0 for block in range(count)
        ]
    for run in load_runs(one.groups, hit, one.keys, tables):
        group = one.groups[run.group]
        needed = one.needed(run.group, 0, hit.tokens)
        each = group.block_hashes
        assert list(run.blocks) == [1000 * (group.index + 1) + block for block in needed]
        assert [bytes(key) for key in run.keys] == [
            one.keys.keys(block, block + 1, each)[0] for block in needed
        ]
        out = np.zeros((len(run.keys), PAGE_BYTES), np.uint8)
        assert one.opened[run.group].load(keys=run.key_runs(), out=out) == len(run.keys)
        assert np.array_equal(out, content(run.keys))
        for begin in (1, len(run.keys) // 2, len(run.keys) - 1):
            rest = np.zeros((len(run.keys) - begin, PAGE_BYTES), np.uint8)
            loaded = one.opened[run.group].load(keys=run.key_runs(begin), out=rest)
            assert loaded == len(rest)
            assert np.array_equal(rest, content(run.keys[begin:]))


@settings(max_examples=25)
@given(model=st.sampled_from(sorted(MODELS)), chance=st.integers(0, 1 << 32))
def test_missing_blocks_are_those_that_are_not_stored(
    client: kvw.Client, model: str, chance: int
) -> None:
    one = prompt(client, model, chance)
    rng = random.Random(chance)
    for place, group in enumerate(one.groups):
        count = one.keys.count(group.block_hashes)
        begin = rng.randint(0, count)
        asked = list(range(begin, rng.randint(begin, count)))
        if not group.chained:
            asked = [block for block in asked if rng.random() < 0.7]
        if asked:
            expected = [block for block in asked if block not in one.stored[place]]
            assert one.matcher.missing(place, one.keys, asked) == expected


def test_prompt_that_nobody_stored_is_not_found(client: kvw.Client) -> None:
    for model in MODELS:
        one = prompt(client, model, 1, stored=[set()] * len(GROUPS[model]))
        assert one.matcher.find(one.keys, 0, 10_000) is None


def test_window_whose_last_block_is_missing_ends_before_it(client: kvw.Client) -> None:
    """The prefix is there in full attention; the window is a few blocks, one of them gone."""
    everything = set(range(200))
    one = prompt(client, "full and window", 7, stored=[everything, everything - {60}])
    hit = one.matcher.find(one.keys, 0, 62 * HASH)
    assert hit is not None
    assert hit.tokens == 60 * HASH
    later = one.matcher.find(one.keys, 0, 70 * HASH)
    assert later is not None
    assert later.tokens == 70 * HASH


def test_pins_hold_what_was_found_until_they_are_released(client: kvw.Client) -> None:
    one = prompt(client, "full and window", 7, stored=[set(range(200))] * 2)
    hit = one.matcher.find(one.keys, 0, 10_000)
    assert hit is not None

    def held() -> int:
        return int(client.status()["core"]["pins"]["held"])

    before = held()
    one.matcher.pin(hit, one.keys)
    assert held() - before == sum(len(span.tiers) for span in hit.groups)
    hit.release()
    assert held() == before
    hit.release()


def test_blocks_that_left_dram_are_found_where_they_are(tmp_path: Path) -> None:
    with kvw.embedded(
        dram="32MiB", nvme_dir=tmp_path, nvme_capacity="64MiB", nvme_segment="16MiB"
    ) as client:
        one = prompt(client, "full", 7, stored=[set(range(40))])
        assert client.flush().pending == 0
        client.evict(one.opened[0].space, 10, "dram")
        hit = one.matcher.find(one.keys, 0, 10_000)
        assert hit is not None
        assert hit.tokens == 40 * HASH
        assert (hit.groups[0].tiers == kvw.Tier.NVME).sum() == 10
        assert hit.dram_share == 0.75


@given(st.lists(st.integers(0, 40), unique=True).map(sorted))
def test_consecutive_parts_are_the_sequence_in_as_few_runs_as_can_be(blocks: list[int]) -> None:
    runs = list(consecutive(blocks))
    assert [block for run in runs for block in run] == blocks
    assert all(one.stop < other.start for one, other in itertools.pairwise(runs))
    assert all(runs)
