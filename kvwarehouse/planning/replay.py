"""Replays a trace through the core's eviction policies: hit rates by tier, pages written, and
predicted times to first token.

Stateless; thread-safe. The policies are those that the daemon runs (native/eviction), over page ids
of the trace instead of an arena's. One call is one pass over the trace; the GIL is released. For
the times each request loads what it hits, tier after tier, and computes the rest; nobody waits in a
queue. OPTIMUM is no policy of the daemon: it knows the future, and says what is left to gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse import core
from kvwarehouse.errors import UsageError
from kvwarehouse.model.footprint import Footprint
from kvwarehouse.planning.hardware import TierSpeed
from kvwarehouse.planning.interval import Quantity
from kvwarehouse.planning.latency import Prefill
from kvwarehouse.trace.trace import Trace

SECONDS_PER_DAY = 86_400

# What the NVMe log may write beyond what it is given: relocation is bounded by a quarter of a
# segment.
WRITE_AMPLIFICATION = 4 / 3

_SWEEP_HALVINGS = 9

OPTIMUM = "opt"
POLICIES = (*core.policy_names(), OPTIMUM)


@dataclass(frozen=True)
class ReplaySetup:
    """Capacities in pages; `dram_pages` None has no bound, `nvme_pages` 0 is no tier.
    `nvme_pages_per_day`: that NVMe may be written, 0 without a bound; the optimum has none.
    `leaves_first`: policies know each page's parent, as in the daemon. The optimum keeps prefixes
    whole in any case."""

    policy: str = "lru"
    dram_pages: int | None = None
    nvme_pages: int = 0
    leaves_first: bool = False
    nvme_pages_per_day: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(
                f"no eviction policy is called {self.policy!r}; known: {', '.join(POLICIES)}",
                code="eviction_policy",
            )
        if self.dram_pages is not None and not 1 <= self.dram_pages < core.ENDLESS:
            raise UsageError(
                f"a DRAM tier of {self.dram_pages} pages cannot be; use 1 or more", code="bad_pages"
            )
        if not 0 <= self.nvme_pages < core.ENDLESS:
            raise UsageError(
                f"an NVMe tier of {self.nvme_pages} pages cannot be; use 0 or more",
                code="bad_pages",
            )

    @property
    def order(self) -> str:
        return "leaves" if self.leaves_first or self.is_optimum else "pages"

    @property
    def is_optimum(self) -> bool:
        return self.policy == OPTIMUM


@dataclass(frozen=True)
class ReplayRun:
    """What one pass found. Hits are pages, one number for each request. `nvme` of the optimum
    counts pages of both tiers as one."""

    setup: ReplaySetup
    trace: Trace
    dram_hits: NDArray[np.uint32]
    nvme_hits: NDArray[np.uint32]
    dram: dict[str, int]
    nvme: dict[str, int]

    @property
    def hits(self) -> int:
        return int(self.dram_hits.sum()) + int(self.nvme_hits.sum())

    @property
    def hit_rate(self) -> float:
        """Pages hit in prefix order over pages asked for."""
        return self.hits / self.trace.asked

    def tier_rate(self, tier: str) -> float:
        hits = self.dram_hits if tier == "dram" else self.nvme_hits
        return float(hits.sum()) / self.trace.asked

    @property
    def nvme_writes_per_day(self) -> float | None:
        """How often a day the NVMe tier is written full; None without one, without a span, and for
        the optimum."""
        if not self.setup.nvme_pages or self.setup.is_optimum or self.trace.span_s <= 0:
            return None
        days = self.trace.span_s / SECONDS_PER_DAY
        return self.nvme["written"] / self.setup.nvme_pages / days


def run_replay(trace: Trace, setup: ReplaySetup) -> ReplayRun:
    if setup.is_optimum:
        return _optimum(trace, setup)
    dram = core.ENDLESS if setup.dram_pages is None else setup.dram_pages
    found: dict[str, Any] = core.replay(
        trace.pages,
        trace.ends,
        trace.ids,
        setup.policy,
        (dram, setup.nvme_pages),
        setup.leaves_first,
        setup.nvme_pages_per_day,
        _times_ns(trace) if setup.nvme_pages_per_day else None,
    )
    return ReplayRun(
        setup, trace, found["dram_hits"], found["nvme_hits"], found["dram"], found["nvme"]
    )


def _times_ns(trace: Trace) -> NDArray[np.uint64]:
    """Since the first request."""
    since: NDArray[np.uint64] = ((trace.times_s - trace.times_s[0]) * 1e9).astype(np.uint64)
    return since


def _optimum(trace: Trace, setup: ReplaySetup) -> ReplayRun:
    """The two tiers can at best hold what one of both sizes together would. Where ids do not stand
    for prefixes, that may hit less of a request than DRAM alone: then NVMe adds nothing to it."""
    dram_pages = core.ENDLESS if setup.dram_pages is None else setup.dram_pages
    both_pages = min(dram_pages + setup.nvme_pages, core.ENDLESS)
    found: dict[int, dict[str, Any]] = {
        pages: core.optimal_hits(trace.pages, trace.ends, trace.ids, pages)
        for pages in {dram_pages, both_pages}
    }
    hits: dict[int, NDArray[np.uint32]] = {pages: each.pop("hits") for pages, each in found.items()}
    dram_hits = hits[dram_pages]
    nvme_hits = np.maximum(hits[both_pages], dram_hits) - dram_hits
    return ReplayRun(setup, trace, dram_hits, nvme_hits, found[dram_pages], found[both_pages])


def sweep(trace: Trace, setup: ReplaySetup, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """The miss-ratio curve: the hit rate for each DRAM size in pages, NVMe left out."""
    return [
        (pages, run_replay(trace, replace(setup, dram_pages=pages, nvme_pages=0)).hit_rate)
        for pages in sizes
    ]


def sweep_sizes(trace: Trace) -> list[int]:
    """From a five-hundredth of the different pages to all of them, doubling."""
    return sorted({max(1, trace.ids >> halvings) for halvings in range(_SWEEP_HALVINGS + 1)})


def compared(setup: ReplaySetup) -> list[ReplaySetup]:
    """The setup with every policy in both orders, and the optimum, which has one."""
    policies = [
        replace(setup, policy=policy, leaves_first=leaves_first)
        for policy in core.policy_names()
        for leaves_first in (False, True)
    ]
    return [*policies, replace(setup, policy=OPTIMUM)]


Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class ReplayTiming:
    """With `footprint` what is loaded of a hit is what a context of its length holds; without, all
    of its pages, of `page_bytes` each."""

    prefill: Prefill
    dram: TierSpeed
    nvme: TierSpeed
    page_bytes: int
    footprint: Footprint | None = None

    @property
    def assumption(self) -> str:
        held = ", windows load only their span" if self.footprint else ""
        return (
            f"{self.prefill.assumption}; DRAM {self.dram.assumption}; NVMe {self.nvme.assumption};"
            f" {self.page_bytes:,} bytes a page{held}, no queues"
        )


@dataclass(frozen=True)
class FirstTokens:
    """Of one percentile (or the mean): with the tiers, and computed from the start."""

    name: str
    loaded: Quantity
    recomputed: Quantity


def first_tokens(run: ReplayRun, timing: ReplayTiming) -> list[FirstTokens]:
    loaded = [_seconds(run, timing, case, loads=True) for case in ("value", "low", "high")]
    computed = [_seconds(run, timing, case, loads=False) for case in ("value", "low", "high")]
    rows = [FirstTokens("mean", _mean(loaded), _mean(computed))]
    for percent in (50, 90, 99):
        rows.append(
            FirstTokens(f"p{percent}", _percentile(loaded, percent), _percentile(computed, percent))
        )
    return rows


def _seconds(run: ReplayRun, timing: ReplayTiming, case: str, *, loads: bool) -> Seconds:
    """Of every request, in the best ("low"), usual or worst case of all assumptions at once."""
    trace = run.trace
    # At least one token is computed, for its logits.
    tokens = np.maximum(trace.input_tokens, 1).astype(np.float64)
    token_s = getattr(timing.prefill.token_s, case)
    pair_s = getattr(timing.prefill.pair_s, case)
    total = np.zeros(trace.requests)
    cached = np.zeros(trace.requests)
    if loads:
        pages = run.dram_hits.astype(np.float64) + run.nvme_hits
        page_bytes = _loaded_page_bytes(pages, timing, trace.block_tokens)
        for hits, tier in ((run.dram_hits, timing.dram), (run.nvme_hits, timing.nvme)):
            total += _load(hits, tier, page_bytes, case)
        cached = np.minimum(pages * trace.block_tokens, tokens - 1)
    total += token_s * (tokens - cached) + pair_s * (tokens**2 - cached**2) / 2
    return total


def _loaded_page_bytes(
    pages: NDArray[np.float64], timing: ReplayTiming, block_tokens: int
) -> NDArray[np.float64]:
    """What is loaded of each request's hit of `pages`, spread evenly over them: which of them are
    in which tier is not known."""
    if timing.footprint is None:
        return np.full(len(pages), float(timing.page_bytes))
    counts, which = np.unique(pages, return_inverse=True)
    # Of no hit nothing is loaded, whatever it is divided by.
    each = [
        timing.footprint.context_bytes(int(count) * block_tokens) / max(1.0, count)
        for count in counts
    ]
    found: NDArray[np.float64] = np.array(each)[which]
    return found


def _load(
    hits: NDArray[np.uint32], tier: TierSpeed, page_bytes: NDArray[np.float64], case: str
) -> Seconds:
    # The best case of a time is the best of a rate: its high end.
    rate = getattr(tier.read, {"value": "value", "low": "high", "high": "low"}[case])
    seconds: Seconds = hits * (page_bytes / rate) + (hits > 0) * getattr(tier.latency_s, case)
    return seconds


def _mean(cases: list[Seconds]) -> Quantity:
    return Quantity(*(float(each.mean()) for each in cases))


def _percentile(cases: list[Seconds], percent: int) -> Quantity:
    return Quantity(*(float(np.percentile(each, percent)) for each in cases))
