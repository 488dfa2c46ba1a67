"""A block is announced when every rank has stored it, in vLLM's own words."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm installs it")

from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

import kvwarehouse_connectors.vllm.events as events_module
from kvwarehouse_connectors.vllm import compat
from kvwarehouse_connectors.vllm.cache_layout import cache_groups
from kvwarehouse_connectors.vllm.events import StoreEvents
from vllm_parts.requests import adapter, request, tokens
from vllm_parts.specs import config, full, window

WANTED = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
UNWANTED = [
    SimpleNamespace(kv_events_config=None),
    SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=False)),
    SimpleNamespace(),
]
CONFIG = config(window(16, 64), full(32), hash_tokens=16)
GROUPS = cache_groups(CONFIG)
FIELDS = compat.event_fields(CONFIG)
FULL, WINDOW = GROUPS


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(events_module, "time", clock)
    return clock


@pytest.fixture
def asked(rng: random.Random) -> Any:
    return request(tokens(rng, 100), hash_tokens=16, lora_request=adapter("/a"))


def stored(place: int, *keys: bytes, ranks: int = 1) -> Counter[tuple[int, bytes]]:
    return Counter({(place, key): ranks for key in keys})


def test_event_says_what_vllm_says_of_its_own_blocks(asked: Any) -> None:
    events = StoreEvents(WANTED, GROUPS, 1, FIELDS)
    events.ordered(asked, FULL, [1], [b"key"])
    events.stored(stored(0, b"key"))
    (event,) = events.take()
    hashes = [maybe_convert_block_hash(one) for one in asked.block_hashes]
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [hashes[3]]
    assert event.parent_block_hash == hashes[1]
    assert event.token_ids == list(asked.all_token_ids[32:64])
    assert (event.block_size, event.group_idx, event.medium) == (32, 1, "CPU")
    assert (event.lora_id, event.lora_name) == (1, "a")
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == (
        "full_attention",
        None,
    )
    assert event.locality == "LOCAL"


def test_event_of_a_window_says_how_long_it_is(asked: Any) -> None:
    events = StoreEvents(WANTED, GROUPS, 1, FIELDS)
    asked.session_id = "talk"
    events.ordered(asked, WINDOW, [1], [b"key"])
    events.stored(stored(1, b"key"))
    (event,) = events.take()
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 64)
    assert event.session_id == "talk"


def test_first_block_has_no_parent(asked: Any) -> None:
    events = StoreEvents(WANTED, GROUPS, 1, FIELDS)
    events.ordered(asked, WINDOW, [0], [b"key"])
    events.stored(stored(1, b"key"))
    (event,) = events.take()
    assert event.parent_block_hash is None
    assert event.group_idx == 0


def test_block_is_announced_once_and_only_when_every_rank_has_stored_it(asked: Any) -> None:
    events = StoreEvents(WANTED, GROUPS, 3, FIELDS)
    events.ordered(asked, FULL, [0, 1], [b"a", b"b"])
    events.stored(stored(0, b"a", ranks=2))
    events.stored(stored(0, b"b"))
    assert list(events.take()) == []
    assert events.pending()
    events.stored(stored(0, b"a"))
    events.stored(stored(0, b"a", ranks=3))
    assert [event.block_hashes for event in events.take()] == [
        [maybe_convert_block_hash(asked.block_hashes[1])]
    ]
    assert list(events.take()) == []


def test_block_of_one_group_is_not_that_of_another(asked: Any) -> None:
    events = StoreEvents(WANTED, GROUPS, 1, FIELDS)
    events.ordered(asked, FULL, [0], [b"key"])
    events.stored(stored(1, b"key"))
    assert list(events.take()) == []


@pytest.mark.parametrize("config_", UNWANTED)
def test_nothing_is_remembered_where_the_engine_publishes_nothing(config_: Any, asked: Any) -> None:
    events = StoreEvents(config_, GROUPS, 1, FIELDS)
    events.ordered(asked, FULL, [0], [b"key"])
    events.stored(stored(0, b"key"))
    events.cleared()
    assert list(events.take()) == []
    assert not events.pending()


def test_engine_is_kept_awake_for_a_moment_only(asked: Any, clock: Clock) -> None:
    events = StoreEvents(WANTED, GROUPS, 1, FIELDS)
    assert not events.pending()
    events.ordered(asked, FULL, [0], [b"key"])
    assert events.pending()
    clock.now_s += 1.9
    assert events.pending()
    clock.now_s += 0.2
    assert not events.pending()
    events.stored(stored(0, b"key"))
    assert list(events.take()) == []


def test_engine_is_not_kept_awake_once_all_is_told(asked: Any) -> None:
    events = StoreEvents(WANTED, GROUPS, 1, FIELDS)
    events.ordered(asked, FULL, [0], [b"key"])
    events.stored(stored(0, b"key"))
    assert not events.pending()


def test_reset_announces_that_all_is_cleared_and_nothing_older(asked: Any) -> None:
    events = StoreEvents(WANTED, GROUPS, 1, FIELDS)
    events.ordered(asked, FULL, [0, 1], [b"a", b"b"])
    events.stored(stored(0, b"a"))
    events.cleared()
    events.stored(stored(0, b"b"))
    (event,) = events.take()
    assert isinstance(event, AllBlocksCleared)


def test_blocks_that_are_never_confirmed_are_bounded(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "_MOST_WAITING", 3)
    events = StoreEvents(WANTED, GROUPS, 1, FIELDS)
    for key in (b"a", b"b", b"c", b"d"):
        events.ordered(asked, FULL, [0], [key])
    events.stored(stored(0, b"a", b"b", b"c", b"d"))
    assert len(list(events.take())) == 3


def test_blocks_that_nobody_stored_do_not_silence_those_after_them(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "_MOST_WAITING", 3)
    events = StoreEvents(WANTED, GROUPS, 1, FIELDS)
    for number in range(20):
        events.ordered(asked, FULL, [0], [b"lost %d" % number])
    events.ordered(asked, FULL, [0, 1], [b"a", b"b"])
    events.stored(stored(0, b"a", b"b"))
    assert len(list(events.take())) == 2


def test_block_that_is_ordered_again_waits_behind_the_others(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "_MOST_WAITING", 2)
    events = StoreEvents(WANTED, GROUPS, 1, FIELDS)
    for key in (b"a", b"b", b"a", b"c"):
        events.ordered(asked, FULL, [0], [key])
    events.stored(stored(0, b"a"))
    events.stored(stored(0, b"b"))
    assert len(list(events.take())) == 1
