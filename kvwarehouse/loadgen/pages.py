"""What a drive of the daemon found: pages by tier, times, what was not loaded or stored and why.
Thread-safe, of fixed size.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from kvwarehouse.loadgen.histogram import Histogram
from kvwarehouse.loadgen.timeline import Timeline

# Columns of the timeline.
REQUESTS, ASKED, HITS, LOADED_BYTES = range(4)


@dataclass
class Served:
    """Of one request, in pages. `load_s` and `store_s` are None where there was none."""

    asked: int
    hit_dram: int = 0
    hit_nvme: int = 0
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
class Pages:
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

    def add(self, served: Served, at_s: float) -> None:
        with self._lock:
            self.counts["requests"] += 1
            for name in ("asked", "hit_dram", "hit_nvme", "loaded", "wrong", "stored", "already"):
                self.counts[name] += getattr(served, name)
            self.missed.update(served.missed)
            self.dropped.update(served.dropped)
            for name in ("lookup", "load", "store"):
                taken_s = getattr(served, f"{name}_s")
                if taken_s is not None:
                    getattr(self, name).add(taken_s)
            hits = served.hit_dram + served.hit_nvme
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
