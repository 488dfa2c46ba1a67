"""Load or compute, for this engine: its prefill rate from its own steps, and what the tiers do.

Runs in the scheduler's thread alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

import kvwarehouse as kvw
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.core.load_policy import (
    ASSUMED_REMOTE_BYTES_PER_S,
    PrefillRate,
    TierRates,
    worth_loading,
)
from kvwarehouse_connectors.core.prefix_matcher import OBJECT_TOKENS, PrefixHit
from kvwarehouse_connectors.vllm.messages import StepResults
from kvwarehouse_connectors.vllm.settings import Settings

# Before the first long step: low for a GPU, high for a CPU, so that the first loads are given up
# early rather than late.
_ASSUMED_TOKENS_PER_S = {"cpu": 2_000.0}
_ASSUMED_ELSEWHERE_TOKENS_PER_S = 20_000.0
# Weight of the newest delivery in what a tier is believed to do.
_NEWEST = 0.3
# A tier that was found too slow is tried again after this long: disks recover.
_TRY_AGAIN_S = 2.0
_SURE_SHARE = 0.25
_HOPED_BYTES_PER_S = 4e9
_AGAIN_FAST = 1.5
# Objects of the remote store that come side by side for one load: half of those that the daemon
# gets at a time, since others load as well. The daemon says what one of them does.
_REMOTE_STREAMS = 4
# Of one object, at most.
_OBJECT_BYTES = 16 << 20
# More of one request in a step than speculative decoding tries.
_PREFILL_TOKENS = 32
# Steps under way at once; more means that the engine skipped reporting some.
_MOST_STEPS = 8


class LoadPolicy:
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
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=_MOST_STEPS)
        self._ended_at_s = 0.0
        self._avoids_nvme_until_s = 0.0
        self._avoids_remote_until_s = 0.0
        self._nvme_measured = False

    def step_begins(self, scheduled: Mapping[str, int]) -> None:
        """scheduled: tokens of each request in this step. Few of one request are decoding."""
        prefill = sum(tokens for tokens in scheduled.values() if tokens >= _PREFILL_TOKENS)
        self._steps.append((time.monotonic(), prefill, sum(scheduled.values())))

    def step_ends(self) -> None:
        """Steps end in the order they began. One that waited for the one before it began then."""
        if not self._steps:
            return
        begun, prefill, tokens = self._steps.popleft()
        now = time.monotonic()
        self._rate.step(prefill, tokens, now - max(begun, self._ended_at_s))
        self._ended_at_s = now

    def delivered(self, results: StepResults) -> None:
        """What the workers' loads measured."""
        if results.load_bytes_per_s:
            self._rates = replace(
                self._rates,
                dram_bytes_per_s=_mixed(self._rates.dram_bytes_per_s, results.load_bytes_per_s),
            )
        if results.nvme_bytes_per_s:
            self._rates = replace(
                self._rates,
                nvme_bytes_per_s=_mixed(self._rates.nvme_bytes_per_s, results.nvme_bytes_per_s),
            )
            self._nvme_measured = True
            if results.nvme_bytes_per_s > _AGAIN_FAST * self._rates.nvme_bytes_per_s:
                # Far faster than believed: the disk has recovered.
                self._rates = replace(self._rates, nvme_bytes_per_s=results.nvme_bytes_per_s)
                self._avoids_nvme_until_s = 0.0

    def page_compute_s(self, hit: PrefixHit) -> float:
        """Of one block of the hit's first group; 0 where loads keep to no schedule."""
        return 0.0 if self._always else self._page_compute_s(hit)

    def worth_tokens(self, hit: PrefixHit, control: kvw.Control | None) -> int:
        """The end of the prefix worth loading; at most that of the hit. Nothing comes from NVMe or
        the remote store by a daemon that does not answer, or where they of late do not keep up."""
        group_hit = hit.groups[0]
        now = time.monotonic()
        rates = self._tier_rates(control)
        if not self._always:
            rates = self._hoping_for_remote(hit, rates, now)
        avoid_nvme = control is None or now < self._avoids_nvme_until_s
        avoid_remote = control is None or self._too_slow(hit, rates.remote_bytes_per_s)
        avoided = [kvw.Tier.NVME] * avoid_nvme + [kvw.Tier.REMOTE] * avoid_remote
        if any(np.isin(other.tiers, avoided).any() for other in hit.groups[1:]):
            return hit.local_tokens
        slow = group_hit.tiers == kvw.Tier.NVME
        late = np.isin(group_hit.tiers, avoided)
        reach = int(late.argmax()) if late.any() else len(late)
        if not self._always:
            if slow.any() and not avoid_nvme and self._avoids_nvme_until_s:
                # Once in a while as if it were fast: what is believed changes only by reading.
                self._avoids_nvme_until_s = now + _TRY_AGAIN_S
                rates = replace(rates, nvme_bytes_per_s=_HOPED_BYTES_PER_S, nvme_wait_s=0.0)
            pages = worth_loading(
                group_hit.tiers[:reach], self._bytes_each(hit), self._page_compute_s(hit), rates
            )
            if slow.any() and not avoid_nvme and self._too_slow(hit, rates.nvme_bytes_per_s):
                self._avoids_nvme_until_s = now + _TRY_AGAIN_S
            reach = pages
            whole = len(hit.groups) > 1 or not self._groups[group_hit.place].chained
            if whole and not self._surely(hit, rates):
                return hit.local_tokens
        if reach == len(group_hit.tiers):
            return hit.tokens
        return (group_hit.begin + reach) * self._groups[group_hit.place].block_tokens

    def _surely(self, hit: PrefixHit, rates: TierRates) -> bool:
        """Of several cache groups all of a hit has to come, or all is computed: so what does not
        come from DRAM must take a small part of computing it."""
        waiting_s = 0.0
        for tier, bytes_per_s, wait_s in rates.slow():
            size = sum(
                int((group_hit.tiers == tier).sum()) * self._spaces[group_hit.place].page_bytes
                for group_hit in hit.groups
            )
            waiting_s += wait_s + size / bytes_per_s if size else 0.0
        computing_s = self._page_compute_s(hit) * len(hit.groups[0].tiers)
        return not waiting_s or waiting_s < _SURE_SHARE * computing_s

    def _too_slow(self, hit: PrefixHit, bytes_per_s: float) -> bool:
        """Whether a page that comes so fast takes longer than computing it, whatever else a load
        costs. Nothing is where loads keep to no schedule."""
        return not self._always and self._bytes_each(hit) / bytes_per_s > self._page_compute_s(hit)

    def _hoping_for_remote(self, hit: PrefixHit, rates: TierRates, now: float) -> TierRates:
        """Where the remote store is too slow: as if it were fast, once in a while. What the daemon
        says of it changes only by fetching."""
        remote = (hit.groups[0].tiers == kvw.Tier.REMOTE).any()
        slow = self._too_slow(hit, rates.remote_bytes_per_s)
        if not (remote and slow) or now < self._avoids_remote_until_s:
            return rates
        first = not self._avoids_remote_until_s
        self._avoids_remote_until_s = now + _TRY_AGAIN_S
        if first:
            return rates
        return replace(rates, remote_bytes_per_s=_HOPED_BYTES_PER_S, remote_wait_s=0.0)

    def _page_compute_s(self, hit: PrefixHit) -> float:
        return self._tokens_each(hit) / self._rate.tokens_per_s

    def _tokens_each(self, hit: PrefixHit) -> float:
        return (hit.tokens - hit.local_tokens) / max(1, len(hit.groups[0].tiers))

    def _bytes_each(self, hit: PrefixHit) -> int:
        """Of one block of the first group, with its share of the other groups."""
        total = sum(len(s.tiers) * self._spaces[s.place].page_bytes for s in hit.groups)
        return total // max(1, len(hit.groups[0].tiers))

    def _tier_rates(self, control: kvw.Control | None) -> TierRates:
        if control is None:
            return self._rates
        # The disk reads all shards of a page, a rank copies one.
        shards = self._spaces[0].shards
        told = 0.0 if self._nvme_measured else float(control.nvme_read_bytes_per_s)
        disk = told or self._rates.nvme_bytes_per_s
        largest = max(s.page_bytes for s in self._spaces) * shards
        queued = control.nvme_reads_queued * largest
        stream = float(control.remote_read_bytes_per_s) or ASSUMED_REMOTE_BYTES_PER_S
        store = stream * _REMOTE_STREAMS
        # All pages of an object are there at once.
        pages = max(1, OBJECT_TOKENS // self._spaces[0].page_tokens)
        first_object_s = min(pages * largest, max(largest, _OBJECT_BYTES)) / stream
        return replace(
            self._rates,
            nvme_bytes_per_s=disk / shards,
            nvme_wait_s=queued / disk,
            remote_bytes_per_s=store / shards,
            remote_wait_s=control.remote_queued_bytes / store
            + control.remote_first_byte_ns / 1e9
            + first_object_s,
        )


def _mixed(known: float, newest: float) -> float:
    return (1 - _NEWEST) * known + _NEWEST * newest
