"""What a prefill did, and what all of them did so far."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from kvwarehouse_connectors.transformers.room import RoomyCache


class StoreState(StrEnum):
    """What became of a prefill's pages when it returned."""

    QUEUED = "queued"
    NOTHING_NEW = "nothing_new"
    LOAD_FAILED = "load_failed"
    """Refused: nothing computed after a failed load is stored."""
    WEIGHTS_CHANGED = "weights_changed"
    """Refused: the namespace is of the weights that the connector was made with."""
    QUEUE_FULL = "queue_full"
    OFF = "off"


@dataclass(frozen=True)
class Reuse:
    """The part of a prefill that the warehouse delivered."""

    tokens_matched: int = 0
    """Stored, by the lookup."""
    tokens_loaded: int = 0
    """Loaded, verified and used: a whole number of chunks."""
    bytes_loaded: int = 0
    """Of all pages that were filled."""
    pages_by_tier: dict[str, int] = field(default_factory=dict)
    """Where the lookup saw the pages."""
    lookup_s: float = 0.0
    load_s: float = 0.0
    failure: str | None = None
    """Why the warehouse could not be used, where it could not: the prompt was computed instead."""
    weights_changed: bool = False
    """Whether that is because the model's weights are no longer those it was joined with."""


@dataclass(frozen=True)
class PrefillResult:
    """cache: the whole prompt's, with room to generate into; yours. logits: [1, vocabulary] of the
    last token. total_s: from the call to the logits, the time to first token."""

    cache: RoomyCache
    logits: Any
    prompt_tokens: int
    reuse: Reuse
    compute_s: float
    total_s: float
    store: StoreState

    @property
    def tokens_loaded(self) -> int:
        return self.reuse.tokens_loaded

    @property
    def tokens_computed(self) -> int:
        return self.prompt_tokens - self.reuse.tokens_loaded

    @property
    def next_token(self) -> Any:
        """[1, 1]: the most likely first token of the answer."""
        return self.logits.argmax(-1, keepdim=True)


@dataclass(frozen=True)
class PrefillStats:
    """Totals since the connector was made."""

    prefills: int = 0
    tokens_asked: int = 0
    tokens_loaded: int = 0
    bytes_loaded: int = 0
    load_failures: int = 0
    """Prefills that computed everything because the warehouse failed."""
    weights_changed: int = 0
    """Prefills after the model's weights were changed: nothing is loaded or stored any more."""
    stores_queued: int = 0
    stores_refused: int = 0
    """The queue was full."""
    store_failures: int = 0
    pages_stored: int = 0
    pages_already: int = 0
    pages_dropped: int = 0
    device_fallbacks: int = 0
    """1 where pages of a GPU go through host memory; the log says why."""


class StatsCounter:
    """Adds up PrefillStats. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = PrefillStats()

    def add(self, more: PrefillStats) -> None:
        with self._lock:
            sums = {
                f.name: getattr(self._total, f.name) + getattr(more, f.name) for f in fields(more)
            }
            self._total = replace(self._total, **sums)

    def snapshot(self) -> PrefillStats:
        with self._lock:
            return self._total
