"""The daemon itself as the engine of a drive: each request is looked up, its hits are loaded, the
rest is stored, as an engine's connector would; nothing is computed.

Thread-safe: buffers belong to threads. The first bytes of every page say which block it is, and
each loaded page is checked for them: a drive finds a wrong page too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client import Client
from kvwarehouse.errors import TransportError, UsageError, WarehouseError
from kvwarehouse.loadgen.prompts import Prompt, PromptShape, prompt_of
from kvwarehouse.loadgen.results import DaemonResults, ServedPages
from kvwarehouse.types import MAX_PAGE_TOKENS, Namespace
from kvwarehouse.wire import MAX_TOKENS
from kvwarehouse.workloads.call import WorkloadCall

MARK_BYTES = 16
_BUFFER_BYTES = 64 * 1024 * 1024

_T = TypeVar("_T")
Bytes = NDArray[np.uint8]


class WarehouseEngine:
    def __init__(
        self,
        client: Client,
        shape: PromptShape,
        page_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises UsageError where such pages cannot be."""
        if shape.page_tokens > MAX_PAGE_TOKENS or page_bytes < MARK_BYTES:
            raise UsageError(
                f"pages of {shape.page_tokens} tokens and {page_bytes} bytes cannot be; use at most"
                f" {MAX_PAGE_TOKENS} tokens (--shrink) and {MARK_BYTES} bytes or more",
                code="bad_pages",
            )
        self._shape = shape
        self._clock = clock
        self._page_bytes = page_bytes
        self._ns = client.open(_space(shape, page_bytes))
        self._own = threading.local()
        self._over = threading.Event()
        self.pages = DaemonResults(clock(), page_bytes)

    def ask(self, request: WorkloadCall, deadline_s: float) -> None:
        prompt = prompt_of(request, self._shape)
        end_s = self._clock() + deadline_s
        try:
            served = self._served(prompt, end_s)
        except TransportError as error:
            self.pages.fail(error.code, str(error))
        except WarehouseError as error:
            if isinstance(error, UsageError) and not self.pages.served:
                raise
            self.pages.fail(error.code, str(error))
        else:
            if self._over.is_set():
                self.pages.interrupt()
            else:
                self.pages.add(served, self._clock())

    def hang_up(self) -> None:
        """Requests end at their next batch of pages."""
        self._over.set()

    def close(self) -> None:
        pass

    def _served(self, prompt: Prompt, end_s: float) -> ServedPages:
        tokens = prompt.tokens[:MAX_TOKENS]
        whole = len(tokens) // self._shape.page_tokens
        served = ServedPages(whole)
        match, served.lookup_s = self._timed(lambda: self._ns.lookup(tokens))
        served.hits = match.by_tier
        if match.pages:
            _, served.load_s = self._timed(
                lambda: self._load(tokens, prompt.blocks[: match.pages], served, end_s)
            )
        if served.loaded < whole and not self._over.is_set():
            _, served.store_s = self._timed(
                lambda: self._store(tokens, prompt.blocks[:whole], served, end_s)
            )
        return served

    def _load(self, tokens: Any, blocks: list[int], served: ServedPages, end_s: float) -> None:
        """In batches of the buffer, up to the first page that is not there any more."""
        buffer = self._buffer()
        while served.loaded < len(blocks) and not self._over.is_set():
            first = served.loaded
            batch = blocks[first : first + len(buffer)]
            # A page more than wanted is loaded by nobody: the prompt ends where its matches do.
            upto = tokens[: (first + len(batch)) * self._shape.page_tokens]
            out = buffer[: len(batch)]
            filled = self._ns.load(upto, out, first=first, timeout_s=self._left(end_s))
            served.wrong += self._wrong(out[:filled], batch)
            served.loaded += filled
            for reason, pages in filled.missed.items():
                served.missed[reason] = served.missed.get(reason, 0) + pages
            if filled < len(batch):
                return

    def _store(self, tokens: Any, blocks: list[int], served: ServedPages, end_s: float) -> None:
        """What was not loaded, from there on."""
        buffer, first = self._buffer(), served.loaded
        while first < len(blocks) and not self._over.is_set():
            batch = blocks[first : first + len(buffer)]
            for row, block in zip(buffer, batch, strict=False):
                row[:MARK_BYTES] = self._mark(block)
            upto = tokens[: (first + len(batch)) * self._shape.page_tokens]
            left_s = self._left(end_s)
            result = self._ns.store(upto, buffer[: len(batch)], first=first, timeout_s=left_s)
            served.stored += result.stored
            served.already += result.already
            for reason, pages in result.dropped.items():
                served.dropped[reason] = served.dropped.get(reason, 0) + pages
            first += len(batch)
            if result.dropped:
                # What stands behind a page that was dropped cannot be found: not offered at all.
                if len(blocks) > first:
                    served.dropped["behind"] = served.dropped.get("behind", 0) + len(blocks) - first
                return

    def _wrong(self, pages: Bytes, blocks: list[int]) -> int:
        return sum(
            not np.array_equal(page[:MARK_BYTES], self._mark(block))
            for page, block in zip(pages, blocks, strict=False)
        )

    def _mark(self, block: int) -> Bytes:
        text = f"{self._shape.seed}:{block}".encode()
        return np.frombuffer(blake2b(text, digest_size=MARK_BYTES).digest(), np.uint8)

    def _left(self, end_s: float) -> float:
        return max(0.0, end_s - self._clock())

    def _buffer(self) -> Bytes:
        """This thread's: noise, so that no page is cheaper than KV would be."""
        buffer: Bytes | None = getattr(self._own, "buffer", None)
        if buffer is None:
            rows = max(1, min(1024, _BUFFER_BYTES // self._page_bytes))
            noise = np.random.default_rng(7)
            buffer = noise.integers(0, 256, (rows, self._page_bytes), dtype=np.uint8)
            self._own.buffer = buffer
        return buffer

    def _timed(self, call: Callable[[], _T]) -> tuple[_T, float]:
        begin_s = self._clock()
        found = call()
        return found, self._clock() - begin_s


def _space(shape: PromptShape, page_bytes: int) -> Namespace:
    """Of this seed's pages and no others: their marks differ."""
    return Namespace(
        model="kvwarehouse-drive",
        weights=f"seed {shape.seed}",
        dtype="uint8",
        layout="drive/1",
        page_tokens=shape.page_tokens,
        page_bytes=page_bytes,
        extra={"token ids": f"{shape.first_token}:{shape.end_token}"},
    )
