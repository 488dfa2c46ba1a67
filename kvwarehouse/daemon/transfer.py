"""KV through gRPC: batches of pages between chunks of a stream and the core, through one bounded
buffer a stream, which it holds until it ends.

Thread-safe; nothing is shared but the session and the staging budget, which refuses at its bound
and never waits. Pages are loaded and stored by the same native client that local engines use, so
they are verified before they leave and digested before they are sealed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvwarehouse.daemon.deadline import Deadline
from kvwarehouse.daemon.ledger import NamespaceRecord
from kvwarehouse.errors import CapacityError, UsageError
from kvwarehouse.sizes import format_size
from kvwarehouse.types import CHAIN_SCHEME
from kvwarehouse.undumped import leave_out
from kvwarehouse.wire import CHUNK_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvwarehouse.core import NativeClient, Regions

BUFFER_BYTES: Final = 16 << 20
"""What one stream stages at a time, or one page if that is larger: 16 chunks deep."""

MAX_WAIT_S: Final = 120.0
"""Longest wait of a load for pages from NVMe, and of a batch that is stored for room, whatever the
caller asks for."""

# Of a store's time, what is kept for its answer.
_ANSWER_SHARE: Final = 0.1
_ANSWER_MOST_S: Final = 0.5
# What a lookup spends at most on the question what there is of a remote store, once a second.
_REFRESH_S: Final = 0.05


class Staging:
    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._streams = 0
        self._bytes = 0

    @property
    def streams(self) -> int:
        return self._streams

    @property
    def bytes(self) -> int:
        return self._bytes

    @contextmanager
    def buffer(self, page_bytes: int, pages: int) -> Iterator[NDArray[Any]]:
        """A uint8 buffer of (n, page_bytes), n from 1 to `pages`, for as long as the context lasts.

        Raises CapacityError when all memory is taken (retryable), UsageError when
        one page alone is over the bound."""
        if page_bytes > self.bytes_max:
            raise UsageError(
                f"a page of {format_size(page_bytes)} is over the staging memory of this daemon's "
                f"gRPC service, {format_size(self.bytes_max)}; use the local socket, or start the "
                "daemon with a larger --staging",
                code="page_too_large",
            )
        import numpy as np

        rows = max(1, min(pages, BUFFER_BYTES // page_bytes))
        self._take(rows * page_bytes)
        try:
            memory = np.empty((rows, page_bytes), np.uint8)
            leave_out(memory)
            yield memory
        finally:
            self._give(rows * page_bytes)

    def _take(self, size_bytes: int) -> None:
        with self._lock:
            if self._bytes + size_bytes > self.bytes_max:
                raise CapacityError(
                    f"{format_size(self._bytes)} of {format_size(self.bytes_max)} staging memory "
                    f"are taken and {format_size(size_bytes)} more are needed; try again later, or "
                    "start the daemon with a larger --staging",
                    code="staging_full",
                )
            self._streams += 1
            self._bytes += size_bytes

    def _give(self, size_bytes: int) -> None:
        with self._lock:
            self._streams -= 1
            self._bytes -= size_bytes


@dataclass(frozen=True)
class TransferSpan:
    """Consecutive pages of one shard of a prefix."""

    record: NamespaceRecord
    tokens: NDArray[np.uint32] | None
    keys: list[bytes] | None
    first: int
    pages: int
    shard: int

    @property
    def page_bytes(self) -> int:
        return self.record.space.page_bytes

    def check_kind(self) -> None:
        """Raises UsageError (code "bad_prefix") where the namespace knows its pages by keys and
        tokens are given, or the other way round: nothing would be found."""
        scheme = self.record.space.hash_scheme
        by_keys = scheme != CHAIN_SCHEME
        if by_keys == (self.keys is not None):
            return
        names = f"the engine's block hashes ({scheme})" if by_keys else "their tokens"
        raise UsageError(
            f"namespace {self.record.space.id.hex()} knows its pages by {names}; ask with"
            f" {'those, one a page' if by_keys else 'token ids'}",
            code="bad_prefix",
        )


def span(
    record: NamespaceRecord,
    prefix: tuple[NDArray[np.uint32] | None, list[bytes] | None],
    *,
    first: int,
    pages: int | None,
    shard: int,
) -> TransferSpan:
    """Checks what the request says. `pages`: None for all of the prefix from `first`."""
    tokens, keys = prefix
    space = record.space
    whole = len(keys) if keys is not None else _count(tokens) // space.page_tokens
    if shard >= space.shards:
        raise UsageError(
            f"shard {shard} is not one of this namespace's {space.shards} (numbered from 0)",
            code="bad_shard",
        )
    if first > whole or (pages is not None and first + pages > whole):
        raise UsageError(
            f"pages {first} to {first + (pages or 0)} are not all in the prefix, which has {whole} "
            "whole pages; pass the whole prefix up to the last page",
            code="bad_range",
        )
    return TransferSpan(
        record, tokens, keys, first, whole - first if pages is None else pages, shard
    )


def _count(tokens: NDArray[np.uint32] | None) -> int:
    return 0 if tokens is None else len(tokens)


class GrpcTransfer:
    def __init__(self, session: NativeClient, staging: Staging, regions: type[Regions]) -> None:
        self._session = session
        self._staging = staging
        self._regions = regions

    def lookup(self, span: TransferSpan) -> tuple[int, int, int]:
        """Pages of the longest stored prefix in DRAM, only on NVMe, and behind them probably in the
        remote store. Those in HBM are in DRAM as well, and read from there: this is no process that
        loads into a GPU."""
        # A lookup never asks for the remote store's presence filter, and a client that only looks
        # up over gRPC would never be told of it.
        self._session.refresh(_REFRESH_S)
        space = span.record.space
        hbm, dram, nvme, remote = self._session.lookup(space.id, span.tokens, span.keys)
        return hbm + dram, nvme, remote

    def tiers(self, span: TransferSpan) -> NDArray[np.uint8]:
        """Where each page is, in the numbers of types.Tier; missing behind the first gap. Counts as
        no lookup."""
        return self._session.tiers(span.record.space.id, span.tokens, span.keys, False)

    def release(self, span: TransferSpan) -> int:
        """Says that the stored pages of it are needed no more. Returns how many."""
        return self._session.release(span.record.space.id, span.tokens, span.keys, span.first)

    def load(
        self, span: TransferSpan, timeout_s: float, deadline: Deadline, missed: dict[str, int]
    ) -> Iterator[bytes | int]:
        """Yields chunks of verified pages in order, and at last how many pages they were; fills
        `missed` with why the next ones were not loaded. Waits for promotion at most `timeout_s`.
        Ends where the namespace is cleared meanwhile: what is loaded then may be stored anew."""
        waiting = Deadline(min(timeout_s, MAX_WAIT_S, deadline.remaining_s()))
        done, since = 0, self._clear_epoch(span)
        if span.pages:
            with self._staging.buffer(span.page_bytes, span.pages) as buffer:
                while done < span.pages and not missed:
                    rows = buffer[: span.pages - done]
                    filled, reasons = self._load(span, done, rows, waiting)
                    if self._clear_epoch(span) != since:
                        filled, reasons = 0, {"cleared": len(rows)}
                    yield from _chunks(rows[:filled])
                    done += filled
                    if filled < len(rows):
                        missed.update(reasons or {"missing": len(rows) - filled})
                        # The batches behind the gap were not tried: they are missed for its reason.
                        missed[next(iter(missed))] += span.pages - done - sum(missed.values())
        yield done

    def _clear_epoch(self, span: TransferSpan) -> int | None:
        """As readers and writers of shared memory have it now. The ledger is ahead of it while a
        clear goes on."""
        return self._session.clear_epoch(span.record.space.id)

    def _load(
        self, span: TransferSpan, done: int, rows: NDArray[Any], waiting: Deadline
    ) -> tuple[int, dict[str, int]]:
        return self._session.load(
            span.record.space.id,
            span.tokens,
            span.keys,
            span.first + done,
            self._regions.pages(rows, True),
            span.shard,
            waiting.remaining_s(),
        )

    def store(
        self,
        span: TransferSpan,
        chunks: Iterator[bytes],
        deadline: Deadline,
        since: int | None = None,
    ) -> tuple[int, int, dict[str, int]]:
        """Stores the pages whose bytes `chunks` are: (stored, already, dropped by reason). since:
        the clear epoch that they belong to; None: that of the moment, for all of them. Raises
        UsageError when there are more or fewer bytes; batches that were whole are stored then."""
        since = self._clear_epoch(span) if since is None else since
        # What was dropped is an answer: it has to leave before the call is cut.
        budget_s = deadline.remaining_s()
        waiting = Deadline(budget_s - min(budget_s * _ANSWER_SHARE, _ANSWER_MOST_S))
        stored, already, dropped = 0, 0, dict[str, int]()
        with self._staging.buffer(span.page_bytes, max(1, span.pages)) as buffer:
            for done, rows in _batches(span, chunks, buffer):
                new, old, refused = self._session.store(
                    span.record.space.id,
                    span.tokens,
                    span.keys,
                    span.first + done,
                    self._regions.pages(rows, False),
                    span.shard,
                    waiting.within_s(MAX_WAIT_S),
                    since,
                )
                stored, already = stored + new, already + old
                for reason, pages in refused.items():
                    dropped[reason] = dropped.get(reason, 0) + pages
        return stored, already, dropped


def _batches(
    span: TransferSpan, chunks: Iterator[bytes], buffer: NDArray[Any]
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Fills `buffer` from `chunks` again and again: (pages before this batch, its rows)."""
    total = span.pages * span.page_bytes
    flat = buffer.data.cast("B")
    received = place = done = 0
    for chunk in chunks:
        received += len(chunk)
        if received > total:
            raise _wrong_size(span, f"more than {total}")
        view = memoryview(chunk)
        while len(view):
            taken = min(len(view), len(flat) - place)
            flat[place : place + taken] = view[:taken]
            place, view = place + taken, view[taken:]
            if place == len(flat):
                yield done, buffer
                done, place = done + len(buffer), 0
    if received != total:
        raise _wrong_size(span, str(received))
    if place:
        yield done, buffer[: place // span.page_bytes]


def _wrong_size(span: TransferSpan, received: str) -> UsageError:
    return UsageError(
        f"{span.pages} pages of {span.page_bytes} bytes are {span.pages * span.page_bytes} bytes, "
        f"and {received} came; pages of whole batches before that may be stored",
        code="wrong_size",
    )


def _chunks(rows: NDArray[Any]) -> Iterator[bytes]:
    flat = rows.reshape(-1)
    for start in range(0, len(flat), CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES].tobytes()
