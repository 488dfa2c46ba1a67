"""Load or compute, for this engine: its prefill rate from its own steps, and what the tiers do.

Runs in the scheduler's thread alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import kvwarehouse as kvw
from kvwarehouse_connectors.common.worth import PrefillRate, TierRates, worth_loading
from kvwarehouse_connectors.vllm.finder import Hit
from kvwarehouse_connectors.vllm.groups import CacheGroup
from kvwarehouse_connectors.vllm.messages import Outcomes
from kvwarehouse_connectors.vllm.settings import Settings

# Before the first long step: low for a GPU, high for a CPU, so that the first loads are given up
# early rather than late.
_ASSUMED_TOKENS_PER_S = {"cpu": 2_000.0}
_ASSUMED_ELSEWHERE_TOKENS_PER_S = 20_000.0
# Weight of the newest delivery in what a tier is believed to do.
_NEWEST = 0.3
# A tier that was found too slow is tried again after this long: disks recover.
_TRY_AGAIN_S = 2.0
# Steps under way at once; more means that the engine skipped reporting some.
_MOST_STEPS = 8


class Choice:
    def __init__(
        self,
        settings: Settings,
        spaces: Sequence[kvw.Namespace],
        groups: Sequence[CacheGroup],
        device: str,
    ) -> None:
        assumed = settings.prefill_tokens_per_s or _ASSUMED_TOKENS_PER_S.get(
            device, _ASSUMED_ELSEWHERE_TOKENS_PER_S
        )
        self._rate = PrefillRate(assumed)
        self._always = settings.load == "always"
        self._spaces = spaces
        self._groups = groups
        self._rates = TierRates()
        self._steps: deque[tuple[float, int]] = deque(maxlen=_MOST_STEPS)
        self._ended_at_s = 0.0
        self._avoids_nvme_until_s = 0.0

    def step_begins(self, tokens: int) -> None:
        self._steps.append((time.monotonic(), tokens))

    def step_ends(self) -> None:
        """Steps end in the order they began. One that waited for the one before it began then."""
        if not self._steps:
            return
        begun, tokens = self._steps.popleft()
        now = time.monotonic()
        self._rate.step(tokens, now - max(begun, self._ended_at_s))
        self._ended_at_s = now

    def delivered(self, outcomes: Outcomes) -> None:
        """What the workers' loads measured."""
        if outcomes.load_bytes_per_s:
            self._rates = replace(
                self._rates,
                dram_bytes_per_s=_mixed(self._rates.dram_bytes_per_s, outcomes.load_bytes_per_s),
            )
        if outcomes.nvme_bytes_per_s:
            self._rates = replace(
                self._rates,
                nvme_bytes_per_s=_mixed(self._rates.nvme_bytes_per_s, outcomes.nvme_bytes_per_s),
            )

    def page_compute_s(self, hit: Hit) -> float:
        """Of one block of the hit's first span; 0 where loads keep to no schedule."""
        if self._always:
            return 0.0
        return self._tokens_each(hit) / self._rate.tokens_per_s

    def worth_tokens(self, hit: Hit, control: kvw.Control | None) -> int:
        """The end of the prefix worth loading; at most that of the hit."""
        span = hit.spans[0]
        group = self._groups[span.place]
        tiers = span.tiers
        slow = tiers == kvw.Tier.NVME
        if self._always:
            if control is not None or not slow.any():
                return hit.tokens
            return (span.begin + int(slow.argmax())) * group.block_tokens
        if slow.any() and (control is None or self._avoids_nvme()):
            tiers = tiers[: int(slow.argmax())]  # nobody there to read them, or too slow of late
        pages = worth_loading(
            tiers,
            self._bytes_each(hit),
            self._tokens_each(hit) / self._rate.tokens_per_s,
            self._tier_rates(control),
        )
        if pages < len(span.tiers) and slow.any() and not self._avoids_nvme():
            self._avoids_nvme_until_s = time.monotonic() + _TRY_AGAIN_S
        if pages == len(span.tiers):
            return hit.tokens
        return (span.begin + pages) * group.block_tokens

    def _avoids_nvme(self) -> bool:
        return time.monotonic() < self._avoids_nvme_until_s

    def _tokens_each(self, hit: Hit) -> float:
        return (hit.tokens - hit.local_tokens) / max(1, len(hit.spans[0].tiers))

    def _bytes_each(self, hit: Hit) -> int:
        """Of one block of the first span, with its share of the other spans."""
        total = sum(len(s.tiers) * self._spaces[s.place].page_bytes for s in hit.spans)
        return total // max(1, len(hit.spans[0].tiers))

    def _tier_rates(self, control: kvw.Control | None) -> TierRates:
        if control is None:
            return self._rates
        # The disk reads all shards of a page, a rank copies one.
        shards = self._spaces[0].shards
        disk = float(control.nvme_read_bytes_per_s) or self._rates.nvme_bytes_per_s
        queued = control.nvme_reads_queued * max(s.page_bytes for s in self._spaces) * shards
        return replace(
            self._rates,
            nvme_bytes_per_s=min(disk, self._rates.nvme_bytes_per_s) / shards,
            nvme_wait_s=queued / disk,
        )


def _mixed(known: float, newest: float) -> float:
    return (1 - _NEWEST) * known + _NEWEST * newest
