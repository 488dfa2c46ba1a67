"""KV events on the wire: vLLM's format, in the order of fields that Dynamo and llm-d read."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import pytest

from kvwarehouse.daemon.event_batch import (
    BATCH_BLOCKS,
    BATCH_TOKENS,
    OVERHEAD_BYTES,
    EventBatches,
    ReplayBuffer,
    cleared_batch,
    empty_batch,
    hash_of,
)

PAGE_TOKENS = 4


def key(number: int) -> bytes:
    return struct.pack("<QQ", number, 0xFFFF0000 + number)


def stored(number: int, parent: int | None = None, tiers: int = 1) -> Any:
    tokens = np.arange(number * 10, number * 10 + PAGE_TOKENS, dtype="<u4").tobytes()
    position = 0 if parent is None else 1
    above = b"" if parent is None else key(parent)
    return ("stored", tiers, bytes(16), position, key(number), above, True, tokens)


def removed(number: int, tiers: int = 1) -> Any:
    return ("removed", tiers, bytes(16), 0, key(number), b"", True, b"")


CLEARED = ("cleared", 0, 0, 0, key(0), b"", True, b"")
SYNCED = ("synced", 0, 0, 0, key(0), b"", True, b"")


def events(items: list[Any], adapter: str = "") -> list[Any]:
    found = []
    for batch in EventBatches(PAGE_TOKENS, adapter).of(items):
        decoded = msgpack.unpackb(batch.payload)
        assert len(decoded) == 3  # Dynamo: "expected a tuple of size 3"
        assert isinstance(decoded[0], float)
        assert decoded[2] == 0
        found += decoded[1]
    return found


def llm_d_event(event: list[Any]) -> dict[str, Any]:
    """As llm-d's vllm_adapter.go reads it: structs of msgpack arrays, by position alone."""
    if event[0] == "BlockStored":
        names = ("hashes", "parent", "tokens", "block_size", "lora_id", "medium", "lora_name")
    elif event[0] == "BlockRemoved":
        names = ("hashes", "medium")  # type: ignore[assignment]
    else:
        names = ()  # type: ignore[assignment]
    assert len(event) == 1 + len(names)
    return {"tag": event[0], **dict(zip(names, event[1:], strict=True))}


def test_events_have_the_fields_that_llm_d_reads_by_position() -> None:
    first, second, third = (
        llm_d_event(event) for event in events([stored(7, 6, tiers=2), removed(5), CLEARED], "ada")
    )
    assert first == {
        "tag": "BlockStored", "hashes": [7], "parent": 6, "tokens": [70, 71, 72, 73],
        "block_size": 4, "lora_id": None, "medium": "DISK", "lora_name": "ada",
    }  # fmt: skip
    assert second == {"tag": "BlockRemoved", "hashes": [5], "medium": "CPU"}
    assert third == {"tag": "AllBlocksCleared"}


def test_hash_is_an_unsigned_number_of_64_bits() -> None:
    # Dynamo refuses bytes; llm-d takes the last eight of them.
    assert hash_of(struct.pack("<QQ", 2**64 - 1, 1)) == 2**64 - 1
    assert events([("stored", 1, bytes(16), 0, b"\xff" * 16, b"", True, bytes(16))])[0][1] == [
        2**64 - 1
    ]


def test_pages_that_follow_each_other_in_their_chain_are_one_event() -> None:
    found = events([stored(1), stored(2, 1), stored(3, 2), stored(9, 1)])
    assert [event[1:3] for event in found] == [[[1, 2, 3], None], [[9], 1]]
    assert found[0][3] == [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]


def test_pages_of_different_tiers_are_different_events_and_both_tiers_two() -> None:
    found = events([stored(1, tiers=3), stored(2, 1, tiers=3), stored(3, 2, tiers=1)])
    assert [(event[1], event[6]) for event in found] == [
        ([1, 2], "CPU"),
        ([1, 2], "DISK"),
        ([3], "CPU"),
    ]


def test_order_is_kept_between_arrivals_and_removals_of_a_page() -> None:
    found = events([stored(1), removed(1), stored(1), removed(1), removed(2)])
    assert [event[0] for event in found] == [
        "BlockStored", "BlockRemoved", "BlockStored", "BlockRemoved",
    ]  # fmt: skip
    assert found[-1][1] == [1, 2]


def test_what_comes_before_a_clear_is_in_a_batch_before_it() -> None:
    batches = list(EventBatches(PAGE_TOKENS, "").of([stored(1), CLEARED, stored(2), SYNCED]))
    assert [batch.clears for batch in batches] == [False, True]
    assert [event[0] for event in msgpack.unpackb(batches[1].payload)[1]] == [
        "AllBlocksCleared", "BlockStored",
    ]  # fmt: skip
    assert cleared_batch().clears


@pytest.mark.parametrize("page_tokens", [1, 16, 4096])
def test_batches_are_bounded_however_long_the_chain(page_tokens: int) -> None:
    def item(number: int) -> Any:
        parent = key(number - 1) if number else b""
        return ("stored", 3, bytes(16), number, key(number), parent, True, bytes(4 * page_tokens))

    batches = list(EventBatches(page_tokens, "").of([item(number) for number in range(3000)]))
    assert sum(batch.stored for batch in batches) == 6000
    for batch in batches:
        assert batch.stored <= 2 * BATCH_BLOCKS
        tokens = sum(len(event[3]) for event in msgpack.unpackb(batch.payload)[1])
        assert tokens <= 2 * max(BATCH_TOKENS, page_tokens)


def test_an_empty_batch_says_nothing() -> None:
    assert msgpack.unpackb(empty_batch())[1:] == [[], 0]


# --- replay


def batch(clears: bool = False) -> Any:
    return cleared_batch() if clears else next(EventBatches(PAGE_TOKENS, "").of([stored(1)]))


def numbers(entries: Any) -> list[int]:
    return [number for number, _ in entries]


def test_replay_has_what_was_asked_for_from_there_on() -> None:
    buffer = ReplayBuffer(1 << 20, first=100)
    for _ in range(5):
        buffer.add(batch())
    assert numbers(buffer.since(102)) == [102, 103, 104]
    assert buffer.since(105) == []
    assert buffer.next == 105


def test_replay_of_what_is_gone_begins_with_the_last_clear() -> None:
    buffer = ReplayBuffer(1 << 20, first=100)
    for clears in (True, False, True, False):
        buffer.add(batch(clears))
    assert numbers(buffer.since(0)) == [102, 103]  # of an earlier daemon, or of a late subscriber
    assert numbers(buffer.since(100)) == [100, 101, 102, 103]


def test_replay_says_so_when_neither_the_batch_nor_a_clear_is_there() -> None:
    size = len(batch().payload) + OVERHEAD_BYTES
    buffer = ReplayBuffer(3 * size, first=100)
    buffer.add(batch(clears=True))
    for _ in range(10):
        buffer.add(batch())
    assert buffer.since(100) is None
    assert buffer.since(107) is None
    assert numbers(buffer.since(108)) == [108, 109, 110]


def test_replay_buffer_keeps_the_newest_batch_however_large() -> None:
    buffer = ReplayBuffer(1, first=0)
    buffer.add(batch())
    buffer.add(batch())
    assert numbers(buffer.since(1)) == [1]
    assert buffer.since(0) is None
