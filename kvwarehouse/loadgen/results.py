"""What a drive found: of an engine times, counts, and failures by reason; of the daemon pages by
tier, times, and what was not loaded or stored and why. Thread-safe, of fixed size.

TTFT   from sending a request to its first token
ITL    between two arrivals of tokens, all of them
TPOT   (last token - first token) / (tokens - 1), one a request
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvwarehouse.loadgen.histogram import Histogram, Timeline

INTERRUPTED = "interrupted"

# Where a lookup finds pages (`Match.by_tier`).
TIERS = ("hbm", "dram", "nvme", "remote")

_MOST_REASONS = 100
_MOST_DETAIL = 200

# Columns of the timeline.
ANSWERED, FAILED, TOKENS, FIRST_S = range(4)

# Columns of the timeline.
REQUESTS, ASKED, HITS, LOADED_BYTES = range(4)


@dataclass
class EngineAnswer:
    """Times of one clock; `arrivals_s` has one for each time tokens came. Counts that the server
    did not say are None."""

    begin_s: float
    end_s: float
    arrivals_s: Sequence[float]
    asked_tokens: int
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass
class EngineResults:
    begin_s: float
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)
    timeline: Timeline = field(default_factory=lambda: Timeline(4))
    failures: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    answered: int = 0
    interrupted: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    said_usage: int = 0
    said_cached: int = 0
    short: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def answer(self, answer: EngineAnswer) -> None:
        arrivals = answer.arrivals_s
        tokens = len(arrivals) if answer.output_tokens is None else answer.output_tokens
        first_s = arrivals[0] - answer.begin_s
        with self._lock:
            self.answered += 1
            self.output_tokens += tokens
            self.short += tokens < answer.asked_tokens
            self.ttft.add(first_s)
            self.whole.add(answer.end_s - answer.begin_s)
            for before, after in pairwise(arrivals):
                self.itl.add(after - before)
            if tokens > 1:
                self.tpot.add((arrivals[-1] - arrivals[0]) / (tokens - 1))
            self._usage(answer)
            self.timeline.add(answer.end_s - self.begin_s, 1, 0, tokens, first_s)

    def fail(self, reason: str, detail: str, at_s: float) -> None:
        """`detail` is kept of the first of each reason."""
        with self._lock:
            if reason == INTERRUPTED:
                self.interrupted += 1
                return
            if reason not in self.failures and len(self.failures) >= _MOST_REASONS:
                reason = "other"
            self.failures[reason] += 1
            self.details.setdefault(reason, detail[:_MOST_DETAIL])
            self.timeline.add(at_s - self.begin_s, 0, 1, 0, 0)

    def _usage(self, answer: EngineAnswer) -> None:
        if answer.prompt_tokens is None:
            return
        self.said_usage += 1
        self.prompt_tokens += answer.prompt_tokens
        if answer.cached_tokens is not None:
            self.said_cached += 1
            self.cached_tokens += answer.cached_tokens


@dataclass
class ServedPages:
    """Of one request, in pages; `hits` by tier, as the lookup says them. `load_s` and `store_s` are
    None where there was none."""

    asked: int
    hits: Mapping[str, int] = field(default_factory=dict)
    loaded: int = 0
    wrong: int = 0
    stored: int = 0
    already: int = 0
    missed: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    lookup_s: float | None = None
    load_s: float | None = None
    store_s: float | None = None


@dataclass
class DaemonResults:
    begin_s: float
    page_bytes: int
    lookup: Histogram = field(default_factory=Histogram)
    load: Histogram = field(default_factory=Histogram)
    store: Histogram = field(default_factory=Histogram)
    timeline: Timeline = field(default_factory=lambda: Timeline(4))
    failures: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    interrupted: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def served(self) -> int:
        return self.counts["requests"]

    @property
    def hits(self) -> int:
        """Pages, in all tiers together."""
        return sum(self.counts[f"hit_{tier}"] for tier in TIERS)

    def add(self, served: ServedPages, at_s: float) -> None:
        with self._lock:
            self.counts["requests"] += 1
            for name in ("asked", "loaded", "wrong", "stored", "already"):
                self.counts[name] += getattr(served, name)
            for tier, pages in served.hits.items():
                self.counts[f"hit_{tier}"] += pages
            self.missed.update(served.missed)
            self.dropped.update(served.dropped)
            for name in ("lookup", "load", "store"):
                taken_s = getattr(served, f"{name}_s")
                if taken_s is not None:
                    getattr(self, name).add(taken_s)
            hits = sum(served.hits.values())
            loaded_bytes = served.loaded * self.page_bytes
            self.timeline.add(at_s - self.begin_s, 1, served.asked, hits, loaded_bytes)

    def interrupt(self) -> None:
        """A request that did not come to its end: its pages count nowhere."""
        with self._lock:
            self.interrupted += 1

    def fail(self, reason: str, detail: str) -> None:
        with self._lock:
            self.failures[reason] += 1
            self.details.setdefault(reason, detail)
