"""Pages that change where they lie, in the arena and in segments, while their daemon serves: a
damaged page is a miss, or the other tier's good copy, and is counted. Nothing wrong is ever served.

One daemon for all; a namespace and bytes of its own for each test.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import kvwarehouse as kvw
from kvwarehouse_bench.harness.eventually import eventually
from kvwarehouse_bench.harness.serving import Serving
from testkit import damage
from testkit.known_prompt import KnownPrompt

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("counted")]

PAGE_BYTES = 20_000
PAGES = 12
BAD = 5
SIZES = {"dram": "8MiB", "nvme_capacity": "32MiB", "nvme_segment": "2MiB", "grace_s": "0.1"}


class Case:
    """A prompt that is stored, in a namespace of the test's own, and counters from here on."""

    def __init__(self, serving: Serving, client: kvw.Client, version: int) -> None:
        self.serving, self.client = serving, client
        self.prompt = KnownPrompt("m", pages=PAGES, page_bytes=PAGE_BYTES, version=version)
        self.ns = client.open(self.prompt.space)
        self.before = self.core()
        self.prompt.store_whole(client)

    def core(self) -> Any:
        return self.client.status()["core"]

    def load(self, client: kvw.Client | None = None, first: int = 0) -> kvw.Loaded:
        return self.prompt.load(client or self.client, first)

    def check(self, *, repair: bool = False) -> list[kvw.CheckProgress]:
        return list(self.client.check(self.prompt.space, repair=repair))

    def in_arena(self, node: int) -> damage.Place:
        return self.prompt.in_arena(self.serving, node)

    def in_segments(self, node: int) -> damage.Place:
        return self.prompt.in_segments(self.serving, node)

    def looked_up(self) -> int:
        return self.ns.lookup(self.prompt.nodes).pages

    def on_nvme_alone(self) -> None:
        assert self.client.flush().pending == 0
        assert self.client.evict(self.prompt.space, PAGES) == PAGES

    def risen(self, *path: str) -> int:
        """By how much a counter of status has risen."""
        before, now = self.before, self.core()
        for name in path:
            before, now = before.get(name, 0), now[name]
        return int(now - before)


@pytest.fixture(scope="module")
def live_dram(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("live"), dram="8MiB", grace_s="0.1") as serving:
        yield serving


@pytest.fixture(scope="module")
def live_nvme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("live"), **SIZES) as serving:
        yield serving


@pytest.fixture
def in_dram(live_dram: Serving, rng: random.Random) -> Iterator[Case]:
    with live_dram.connect() as client:
        yield Case(live_dram, client, 1 + rng.getrandbits(30))


@pytest.fixture
def in_both(live_nvme: Serving, rng: random.Random) -> Iterator[Case]:
    with live_nvme.connect() as client:
        yield Case(live_nvme, client, 1 + rng.getrandbits(30))


@pytest.mark.parametrize("remote", [False, True])
def test_page_with_a_flipped_bit_is_a_miss_and_is_quarantined(
    in_dram: Case, rng: random.Random, remote: bool
) -> None:
    serving = in_dram.serving
    with serving.connect_remote() if remote else serving.connect() as client:
        in_dram.in_arena(BAD).flip(rng.randrange(8), at=rng.randrange(PAGE_BYTES))
        loaded = in_dram.load(client)
        assert loaded == BAD
        assert loaded.missed
        # It was reported, and nobody waits for the answer.
        eventually(lambda: in_dram.risen("quarantined") == 1, "the page is quarantined")
        assert in_dram.risen("tiers", "dram", "left", "quarantined") == 1
        assert in_dram.risen("loads", "failed", "mismatch") >= 1
        assert in_dram.looked_up() == BAD
        counted = serving.metrics()["kvwarehouse_quarantined_pages_total"]
        assert counted == in_dram.core()["quarantined"]
        # What can be stored again is stored again.
        client.sweep()
        assert in_dram.prompt.store(client).dropped == {}
        assert in_dram.load(client) == PAGES


def test_swapped_payloads_of_two_pages_are_two_misses(in_dram: Case) -> None:
    damage.swap(in_dram.in_arena(BAD), in_dram.in_arena(BAD + 2), PAGE_BYTES)
    assert in_dram.load() == BAD
    assert in_dram.check(repair=True)[-1].done
    # The first was reported by the load, the second is found by the check, if no sweep was faster.
    gone = in_dram.risen("quarantined") + in_dram.risen("tiers", "dram", "left", "orphaned")
    assert gone >= 2
    assert in_dram.looked_up() == BAD


def test_check_finds_damage_that_nobody_has_loaded(in_dram: Case) -> None:
    in_dram.in_arena(BAD).flip()
    found = [bad for progress in in_dram.check() for bad in progress.bad]
    assert [(bad.tier, bad.reason) for bad in found] == [("dram", "digest")]
    assert in_dram.risen("quarantined") == 0
    in_dram.check(repair=True)
    assert in_dram.risen("quarantined") == 1
    assert in_dram.load() == BAD


def test_flipped_page_is_loaded_from_its_good_copy_on_nvme(
    in_both: Case, rng: random.Random
) -> None:
    assert in_both.client.flush().pending == 0
    in_both.in_arena(BAD).flip(at=rng.randrange(PAGE_BYTES))
    assert in_both.load() == PAGES
    assert in_both.risen("quarantined") == 1


@pytest.mark.parametrize("verify", ["always", "boundary"])
def test_record_with_a_flipped_bit_is_a_miss_and_is_counted(
    in_both: Case, rng: random.Random, verify: Any
) -> None:
    in_both.on_nvme_alone()
    in_both.in_segments(BAD).flip(rng.randrange(8), at=rng.randrange(PAGE_BYTES))
    with in_both.serving.connect(verify=verify) as client:
        assert in_both.load(client) == BAD
    assert in_both.risen("tiers", "nvme", "mismatches") == 1
    assert in_both.risen("quarantined") == 1
    assert in_both.risen("tiers", "nvme", "left", "quarantined") == 1
    assert in_both.looked_up() == BAD


def test_swapped_records_are_two_misses_whether_payloads_or_whole(in_both: Case) -> None:
    in_both.on_nvme_alone()
    damage.swap(in_both.in_segments(BAD), in_both.in_segments(BAD + 1), PAGE_BYTES)
    three, four = in_both.in_segments(BAD + 2), in_both.in_segments(BAD + 3)
    damage.swap(three.before(4096), four.before(4096), 4096 + PAGE_BYTES)
    assert in_both.load() == BAD
    for node in (BAD + 1, BAD + 2, BAD + 3):
        assert in_both.load(first=node) == 0
    assert in_both.risen("tiers", "nvme", "mismatches") >= 1


def test_what_was_found_damaged_stays_away_at_the_starts_that_follow(
    both_tiers: Serving, rng: random.Random
) -> None:
    """In one tier each, and what is stored again is there again."""
    prompts = [KnownPrompt("m", pages=PAGES, page_bytes=PAGE_BYTES, version=n) for n in (1, 2)]
    with both_tiers.connect() as client:
        for prompt in prompts:
            prompt.store_whole(client)
        assert client.flush().pending == 0
        assert client.evict(prompts[0].space, PAGES) == PAGES
        assert client.evict(prompts[1].space, PAGES, "nvme") == PAGES
        prompts[0].in_segments(both_tiers, BAD).flip(at=rng.randrange(PAGE_BYTES))
        prompts[1].in_arena(both_tiers, BAD).flip(at=rng.randrange(PAGE_BYTES))
        for prompt in prompts:
            assert prompt.load(client) == BAD
    for start in range(3):
        both_tiers.kill() if rng.random() < 0.5 else both_tiers.stop()
        both_tiers.start()
        with both_tiers.connect() as client:
            for prompt in prompts:
                assert prompt.load(client) == (BAD if start < 2 else PAGES)
                if start == 1:
                    assert prompt.store(client).dropped == {}
                    assert prompt.load(client) == PAGES
