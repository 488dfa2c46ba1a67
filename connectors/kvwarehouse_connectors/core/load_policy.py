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
# Of one read of a common disk, and of asking for it.
_READ_LATENCY_S = 0.0005
# Until a tier has been measured: a slow memory, a common disk, and a common object store.
ASSUMED_DRAM_BYTES_PER_S = 4e9
ASSUMED_NVME_BYTES_PER_S = 1e9
ASSUMED_REMOTE_BYTES_PER_S = 2e8
# A load may fall behind computing by this share of the whole. The promise is 5 %.
SLACK = 0.03


class PrefillRate:
    """Tokens a second of this engine's prefill, from its last steps that did little else: the upper
    quartile, since decoding beside it only makes a step look slower."""

    _LEAST_TOKENS = 64
    _LEAST_SHARE = 0.5
    _KEPT = 15

    def __init__(self, assumed_tokens_per_s: float) -> None:
        self._assumed = assumed_tokens_per_s
        self._rates: deque[float] = deque(maxlen=self._KEPT)

    def step(self, prefill_tokens: int, tokens: int, seconds: float) -> None:
        """A step that computed `tokens` tokens, prefill_tokens of them of prompts, took `seconds`.
        Small steps, and those that mostly decode, say little and do not count."""
        telling = prefill_tokens >= max(self._LEAST_TOKENS, self._LEAST_SHARE * tokens)
        if telling and seconds > 0:
            self._rates.append(prefill_tokens / seconds)

    @property
    def measured(self) -> bool:
        return bool(self._rates)

    @property
    def tokens_per_s(self) -> float:
        if len(self._rates) < 2:
            return self._rates[0] if self._rates else self._assumed
        return statistics.quantiles(self._rates, n=4, method="inclusive")[2]


@dataclass(frozen=True)
class TierRates:
    """What tiers deliver now. nvme_wait_s: until reads that are queued already are done;
    remote_wait_s: until the first object of a load is there."""

    dram_bytes_per_s: float = ASSUMED_DRAM_BYTES_PER_S
    nvme_bytes_per_s: float = ASSUMED_NVME_BYTES_PER_S
    nvme_wait_s: float = 0.0
    remote_bytes_per_s: float = ASSUMED_REMOTE_BYTES_PER_S
    remote_wait_s: float = 0.0

    def slow(self) -> tuple[tuple[kvw.Tier, float, float], ...]:
        """The tiers that a load waits for, each with its rate and its wait."""
        return (
            (kvw.Tier.NVME, self.nvme_bytes_per_s, self.nvme_wait_s),
            (kvw.Tier.REMOTE, self.remote_bytes_per_s, self.remote_wait_s),
        )


def worth_loading(
    tiers: NDArray[np.uint8], page_bytes: int, page_compute_s: float, rates: TierRates
) -> int:
    """How many of the first pages to load: as many as save the most time, 0 where none do.

    tiers: kvw.Tier of each page, none of them MISSING. page_bytes: of all shards that one process
    reads. page_compute_s: seconds to compute one page."""
    pages = len(tiers)
    if not pages:
        return 0
    costs_s = np.full(pages, page_bytes / rates.dram_bytes_per_s)
    for tier, bytes_per_s, _ in rates.slow():
        costs_s[tiers == tier] = page_bytes / bytes_per_s
    saved_s = np.cumsum(page_compute_s - costs_s) - _LOAD_OVERHEAD_S
    schedule = Schedule.of(pages, page_compute_s)
    for tier, bytes_per_s, wait_s in rates.slow():
        from_tier = tiers == tier
        if not from_tier.any():
            continue
        first = int(np.argmax(from_tier))
        saved_s[first:] -= wait_s
        if wait_s + page_bytes / bytes_per_s + _READ_LATENCY_S > schedule.due_s(first):
            saved_s[first:] = -np.inf  # it would be given up as late
    best = int(np.argmax(saved_s))
    return best + 1 if saved_s[best] > 0 else 0


@dataclass(frozen=True)
class Schedule:
    """By when the pages of a load must have come, in seconds from its begin.

    Page i is in time at i * page_s + slack_s: the pages before it are worth their computing, and at
    no moment is the load further behind than slack_s."""

    page_s: float
    slack_s: float

    @staticmethod
    def of(pages: int, page_compute_s: float) -> Schedule:
        return Schedule(page_compute_s, SLACK * pages * page_compute_s)

    def after(self, pages: int) -> Schedule:
        """Of the pages from page `pages` on."""
        return Schedule(self.page_s, self.slack_s + pages * self.page_s)

    def due_s(self, loaded: int) -> float:
        """When the next page, after `loaded`, is due."""
        return loaded * self.page_s + self.slack_s
