"""What a feed says, as batches of KV events in vLLM's wire format, which KV-aware routers read.

A batch is msgpack of [seconds since 1970, [event, ...], rank]; an event is an array that begins
with its name (vllm/distributed/kv_events.py, whose structs are array-like and tagged):

    ["BlockStored", [hash, ...], parent hash or nil, [token id, ...], tokens of a block, nil,
     medium, adapter or nil]
    ["BlockRemoved", [hash, ...], medium]
    ["AllBlocksCleared"]

A page is a block. Its hash is the low half of its key, an unsigned 64-bit number. All three
elements of a batch and all eight of a stored block are always there: Dynamo refuses a batch of two,
llm-d reads by position. Stateless but for Batches.

ReplayBuffer keeps the last batches for subscribers that missed some. Thread-safe; bounded in bytes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgpack

MEDIUM_BY_TIER: Final = {1: "CPU", 2: "DISK"}
"""Tiers of a feed's items to the words that routers know: Dynamo's "CPU" is host memory, "DISK" any
disk; llm-d takes them in lower case as names of tiers. Others ("STORAGE") Dynamo does not index."""

BATCH_BLOCKS: Final = 1024
BATCH_TOKENS: Final = 32_768
"""What one batch has at most, of blocks and of token ids (a token is at most 5 bytes): a message
that a slow subscriber can be sent many of."""

_RANK: Final = 0
_CLEARED: Final = ["AllBlocksCleared"]

OVERHEAD_BYTES: Final = 256
"""What a batch costs beside its payload, generously."""


@dataclass(frozen=True)
class EventBatch:
    payload: bytes
    clears: bool = False
    """Begins with AllBlocksCleared: what came before is moot."""
    stored: int = 0
    """Blocks, a page in two media being two."""
    removed: int = 0


def hash_of(key: bytes) -> int:
    """The hash by which events name the page `key`."""
    return int.from_bytes(key[:8], "little")


def empty_batch() -> bytes:
    """A batch that says nothing: what a stream has said before its first."""
    return _packed([])


def cleared_batch() -> EventBatch:
    return EventBatch(_packed([_CLEARED]), clears=True)


class EventBatches:
    """Makes batches of the items of one namespace. `page_tokens`: of each page; `adapter`: the name
    of what changes its KV, "" for none."""

    def __init__(self, page_tokens: int, adapter: str) -> None:
        self._page_tokens = page_tokens
        self._adapter = adapter or None

    def of(self, items: Iterable[Any]) -> Iterator[EventBatch]:
        """`items`: as Feed.take() has them, all with tokens. In their order."""
        events: list[Any] = []
        clears, stored, removed, tokens = False, 0, 0, 0
        for run in self._runs(items):
            kind, tiers, pages = run[0][0], run[0][1], len(run)
            if kind == "cleared" and events:
                yield EventBatch(_packed(events), clears, stored, removed)
                events, clears, stored, removed, tokens = [], False, 0, 0, 0
            media = [name for tier, name in MEDIUM_BY_TIER.items() if tiers & tier]
            if kind == "cleared":
                events.append(_CLEARED)
                clears = True
            elif kind == "stored":
                events += [self._stored(run, medium) for medium in media]
                stored += pages * len(media)
                tokens += pages * self._page_tokens * len(media)
            else:
                hashes = [hash_of(item[4]) for item in run]
                events += [["BlockRemoved", hashes, medium] for medium in media]
                removed += pages * len(media)
            if stored + removed >= BATCH_BLOCKS or tokens >= BATCH_TOKENS:
                yield EventBatch(_packed(events), clears, stored, removed)
                events, clears, stored, removed, tokens = [], False, 0, 0, 0
        if events:
            yield EventBatch(_packed(events), clears, stored, removed)

    def _stored(self, run: list[Any], medium: str) -> list[Any]:
        tokens = memoryview(b"".join(item[7] for item in run)).cast("I").tolist()
        parent = hash_of(run[0][5]) if run[0][5] else None
        hashes = [hash_of(item[4]) for item in run]
        return [
            "BlockStored", hashes, parent, tokens, self._page_tokens, None, medium, self._adapter,
        ]  # fmt: skip

    def _runs(self, items: Iterable[Any]) -> Iterator[list[Any]]:
        """Consecutive items that are one event: stored pages that follow each other in their chain,
        or removed ones; in the same tiers."""
        most = max(1, min(BATCH_BLOCKS, BATCH_TOKENS // self._page_tokens) // 2)
        run: list[Any] = []
        for item in items:
            if item[0] == "synced":
                continue
            if run and (len(run) == most or not _follows(run[-1], item)):
                yield run
                run = []
            run.append(item)
        if run:
            yield run


def _follows(last: Any, item: Any) -> bool:
    if item[0] != last[0] or item[1] != last[1]:
        return False
    return bool(item[0] == "removed" or (item[0] == "stored" and item[5] == last[4]))


def _packed(events: list[Any]) -> bytes:
    packed: bytes = msgpack.packb([time.time(), events, _RANK])
    return packed


class ReplayBuffer:
    def __init__(self, bound_bytes: int, first: int) -> None:
        """`first`: the sequence number that the first batch will have. Numbers rise by one."""
        self._bound_bytes = bound_bytes
        self._lock = threading.Lock()
        self._batches: deque[tuple[int, EventBatch]] = deque()
        self._bytes = 0
        self._next = first

    @property
    def next(self) -> int:
        """The number of the next batch."""
        with self._lock:
            return self._next

    def add(self, batch: EventBatch) -> int:
        """Keeps it, forgets the oldest beyond the bound, and returns its number."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._batches.append((number, batch))
            self._bytes += len(batch.payload) + OVERHEAD_BYTES
            while self._bytes > self._bound_bytes and len(self._batches) > 1:
                _, old = self._batches.popleft()
                self._bytes -= len(old.payload) + OVERHEAD_BYTES
            return number

    def since(self, number: int) -> list[tuple[int, EventBatch]] | None:
        """Batches from `number` on; where some of them are gone (or are of an earlier daemon), all
        since the last that began with AllBlocksCleared, which says as much. None: neither is here
        any more."""
        with self._lock:
            oldest = self._batches[0][0] if self._batches else self._next
            if number >= oldest:
                return [entry for entry in self._batches if entry[0] >= number]
            clears = [place for place, (_, batch) in enumerate(self._batches) if batch.clears]
            return list(self._batches)[clears[-1] :] if clears else None
