"""Load or compute: how much of a stored prefix is worth loading now.

A loaded page must not come later than it would have been computed. Two things are known: how fast
this engine prefills, measured on its own steps, and how fast each tier delivers, which the daemon
publishes. From them comes the prefix to ask for, and the schedule a load has to keep.

PrefillRate is not thread-safe; the rest is stateless.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw

# What a load costs the engine besides its bytes: a step of the scheduler or two.
_LOAD_OVERHEAD_S = 0.002
# Until a tier has been measured: a slow memory and a common disk.
ASSUMED_DRAM_BYTES_PER_S = 4e9
ASSUMED_NVME_BYTES_PER_S = 1e9
# A load may fall behind computing by this share of the whole. The promise is 5 %.
SLACK = 0.03


class PrefillRate:
    """Tokens a second of this engine's prefill: the median of its last large steps."""

    _LEAST_TOKENS = 64
    _KEPT = 15

    def __init__(self, assumed_tokens_per_s: float) -> None:
        self._assumed = assumed_tokens_per_s
        self._rates: deque[float] = deque(maxlen=self._KEPT)

    def step(self, tokens: int, seconds: float) -> None:
        """A step that computed `tokens` tokens took `seconds`. Small steps say little and do not
        count."""
        if tokens >= self._LEAST_TOKENS and seconds > 0:
            self._rates.append(tokens / seconds)

    @property
    def measured(self) -> bool:
        return bool(self._rates)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(self._rates) if self._rates else self._assumed


@dataclass(frozen=True)
class TierRates:
    """What tiers deliver now. nvme_wait_s: until reads that are queued already are done."""

    dram_bytes_per_s: float = ASSUMED_DRAM_BYTES_PER_S
    nvme_bytes_per_s: float = ASSUMED_NVME_BYTES_PER_S
    nvme_wait_s: float = 0.0


def worth_loading(
    tiers: NDArray[np.uint8], page_bytes: int, page_compute_s: float, rates: TierRates
) -> int:
    """How many of the first pages to load: as many as save the most time, 0 where none do.

    tiers: kvw.Tier of each page, none of them MISSING. page_bytes: of all shards that one process
    reads. page_compute_s: seconds to compute one page."""
    pages = len(tiers)
    if not pages:
        return 0
    from_nvme = tiers == kvw.Tier.NVME
    costs_s = np.where(
        from_nvme, page_bytes / rates.nvme_bytes_per_s, page_bytes / rates.dram_bytes_per_s
    )
    saved_s = np.cumsum(page_compute_s - costs_s) - _LOAD_OVERHEAD_S
    if from_nvme.any():
        saved_s[int(np.argmax(from_nvme)) :] -= rates.nvme_wait_s
    best = int(np.argmax(saved_s))
    return best + 1 if saved_s[best] > 0 else 0


@dataclass(frozen=True)
class Schedule:
    """By when the pages of a load must have come, in seconds from its begin.

    Page i is in time at (i + 1) * page_s + slack_s: at no moment is the load further behind
    computing than slack_s."""

    page_s: float
    slack_s: float

    @staticmethod
    def of(pages: int, page_compute_s: float) -> Schedule:
        return Schedule(page_compute_s, max(SLACK * pages * page_compute_s, _LOAD_OVERHEAD_S))

    def due_s(self, loaded: int) -> float:
        """When the next page, after `loaded`, is due."""
        return (loaded + 1) * self.page_s + self.slack_s
