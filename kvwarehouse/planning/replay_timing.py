"""Predicted times to first token of a replayed trace. Stateless; thread-safe.

Each request loads what it hits, tier after tier, and computes the rest; nobody waits in a queue.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.planning.compute import Prefill
from kvwarehouse.planning.hardware import TierSpeed
from kvwarehouse.planning.interval import Quantity
from kvwarehouse.planning.replay import ReplayRun

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class ReplayTiming:
    prefill: Prefill
    dram: TierSpeed
    nvme: TierSpeed
    page_bytes: int

    @property
    def assumption(self) -> str:
        return (
            f"{self.prefill.assumption}; DRAM {self.dram.assumption}; NVMe {self.nvme.assumption};"
            f" {self.page_bytes:,} bytes a page, no queues"
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
        for hits, tier in ((run.dram_hits, timing.dram), (run.nvme_hits, timing.nvme)):
            total += _load(hits, tier, timing.page_bytes, case)
        pages = run.dram_hits.astype(np.float64) + run.nvme_hits
        cached = np.minimum(pages * trace.block_tokens, tokens - 1)
    total += token_s * (tokens - cached) + pair_s * (tokens**2 - cached**2) / 2
    return total


def _load(hits: NDArray[np.uint32], tier: TierSpeed, page_bytes: int, case: str) -> Seconds:
    # The best case of a time is the best of a rate: its high end.
    rate = getattr(tier.read, {"value": "value", "low": "high", "high": "low"}[case])
    seconds: Seconds = hits * (page_bytes / rate) + (hits > 0) * getattr(tier.latency_s, case)
    return seconds


def _mean(cases: list[Seconds]) -> Quantity:
    return Quantity(*(float(each.mean()) for each in cases))


def _percentile(cases: list[Seconds], percent: int) -> Quantity:
    return Quantity(*(float(np.percentile(each, percent)) for each in cases))
