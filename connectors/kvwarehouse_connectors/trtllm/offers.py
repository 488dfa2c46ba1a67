"""What may be promised to the engine, which cannot hear that a load failed: pages in DRAM, pinned
and verified, of a daemon that every rank is known to load from.

Runs in the scheduler's thread alone; reads shared memory, makes no call, and keeps to its time.
"""

from __future__ import annotations

import os
import time

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection
from kvwarehouse_connectors.core.groups import CacheGroup
from kvwarehouse_connectors.core.prefix_matcher import (
    BlockKeys,
    GroupHit,
    PrefixHit,
    PrefixMatcher,
    page_run,
)
from kvwarehouse_connectors.trtllm.handshake import TrtllmCacheInfo
from kvwarehouse_connectors.trtllm.verified_pages import VerifiedPages

# A barrier that some rank has not come to for so long is made anew: answers are pages, and one
# that stays incomplete is dropped by the daemon.
_CALL_AGAIN_S = 5.0
# A hit is cut at what cannot be promised, and looked for again; more often is not worth the time.
_MOST_CUTS = 8


class ReadinessBarrier:
    """Whether every rank has said that it can load, of the daemon that is there now. `key` is what
    ranks answer to; b"" when they all have."""

    def __init__(self, connection: DaemonConnection, space: kvw.Namespace) -> None:
        self._connection = connection
        self._space = space
        self._key = b""
        self._called_s = 0.0
        self._complete_at = 0  # the incarnation whose daemon all ranks were seen at
        self._incarnation = 0

    def key(self) -> bytes:
        """For the next orders; asks anew where there is another daemon."""
        if self.complete():
            return b""
        now = time.monotonic()
        if not self._key or now - self._called_s > _CALL_AGAIN_S:
            self._key, self._called_s = os.urandom(32), now
        return self._key

    def complete(self) -> bool:
        client = self._connection.client
        opened = self._connection.namespace(self._space)
        if client is None or opened is None:
            return False
        incarnation = client.control().incarnation
        if incarnation != self._incarnation:
            self._incarnation, self._key = incarnation, b""
        if self._complete_at == incarnation:
            return True
        if self._key and opened.tiers(keys=[kvw.KeyRun([self._key])], counted=False).all():
            self._complete_at = incarnation
            return True
        return False


class Offers:
    def __init__(self, cache_info: TrtllmCacheInfo, budget_s: float) -> None:
        self._groups = cache_info.groups
        self._budget_s = budget_s
        self._verified_pages = VerifiedPages()

    def find(
        self,
        matcher: PrefixMatcher,
        keys: BlockKeys,
        local_tokens: int,
        limit_tokens: int,
    ) -> tuple[PrefixHit | None, bool]:
        """The longest prefix that can be promised, pinned; and whether there was one that could
        not, which is made ready for the next lookup."""
        end_s = time.monotonic() + self._budget_s
        hit = matcher.find(keys, local_tokens, limit_tokens)
        unready = False
        for _ in range(_MOST_CUTS):
            if hit is None:
                break
            tokens = self._sure_tokens(matcher, hit, keys, end_s)
            if tokens >= hit.tokens:
                return hit, unready
            unready = True
            hit.release()
            hit = matcher.find(keys, local_tokens, tokens) if tokens > local_tokens else None
        if hit is not None:
            hit.release()
        return None, unready

    def close(self) -> None:
        self._verified_pages.close()

    def _sure_tokens(
        self,
        matcher: PrefixMatcher,
        hit: PrefixHit,
        keys: BlockKeys,
        end_s: float,
    ) -> int:
        """Up to where the hit can be promised: all of it is then pinned and verified."""
        for group_hit in hit.groups:
            slow = ~kvw.Tier.near(group_hit.tiers)
            if slow.any():
                first = int(slow.argmax())
                self._later(matcher, group_hit, keys, group_hit.begin + first)
                return self._cut(group_hit, first)
        matcher.pin(hit, keys)
        for place, group_hit in enumerate(hit.groups):
            pages = hit.pins[place].pages if place < len(hit.pins) else 0
            if pages < group_hit.end - group_hit.begin:
                return self._cut(group_hit, pages)
        for group_hit in hit.groups:
            run = page_run(
                group_hit.place,
                self._group(group_hit),
                keys,
                range(group_hit.begin, group_hit.end),
                None,
            )
            good = self._verified_pages.check(matcher.opened[group_hit.place], run, end_s)
            if good < len(run.keys):
                self._later(matcher, group_hit, keys, group_hit.begin + good)
                return self._cut(group_hit, good)
        return hit.tokens

    def _cut(self, group_hit: GroupHit, place: int) -> int:
        """Tokens up to the group's block at `place`."""
        return (group_hit.begin + place) * self._group(group_hit).block_tokens

    def _later(
        self, matcher: PrefixMatcher, group_hit: GroupHit, keys: BlockKeys, begin: int
    ) -> None:
        run = page_run(
            group_hit.place, self._group(group_hit), keys, range(begin, group_hit.end), None
        )
        self._verified_pages.later(matcher.opened[group_hit.place], run)

    def _group(self, group_hit: GroupHit) -> CacheGroup:
        return self._groups[group_hit.place]
