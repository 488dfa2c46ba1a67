"""What a daemon can take without anything leaving for it. One owner.

An estimate, from the daemon's status, that is corrected by what happens: where pages leave a tier
for want of room, whoever stores them, that tier has none. So at most a window's pages can have left
before it is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

from kvwarehouse.client import Client
from kvwarehouse.errors import UsageError

MayLeave: TypeAlias = Literal["none", "dram", "all"]
"""What may leave for what comes: nothing; DRAM's coldest pages, which NVMe has; any."""

QUEUE_BYTES: Final = 64 << 20
"""What may wait to be written to NVMe before more is stored, and no more than a sixteenth of DRAM:
what the queue takes beyond that is for engines, and what it does not take stays in DRAM alone."""

_QUEUE_WAIT_S: Final = 30.0
_ZOMBIES_WAIT_S: Final = 2.0
_ZOMBIES_ROOM_BYTES: Final = 64 << 20
_LOOK_S: Final = 0.02
_QUEUE_SHARE: Final = 16
_BLOCK: Final = 4096
_DRAM_SHARE: Final = 32  # of the tier is left free: the daemon itself keeps a fiftieth
_SLAB_SHARE: Final = 8
_SLAB_BYTES: Final = 256 << 20
_SPARE_SEGMENTS: Final = 3  # of NVMe, which reclaim keeps two of
_INDEX_SHARE: Final = 64
_FOR_ROOM: Final = ("evicted", "rebalanced", "reclaimed", "write_budget")
_ENDLESS: Final = 1 << 62


class Room:
    """Raises UsageError (code "no_nvme") where DRAM is to make room and nothing has its pages."""

    def __init__(
        self,
        client: Client,
        may_leave: MayLeave,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._may_leave = may_leave
        self._clock = clock
        self._sleep = sleep
        tiers = client.status()["core"]["tiers"]
        if may_leave == "dram" and tiers["nvme"]["health"] != "ok":
            raise UsageError(
                "--evict dram is for a daemon with an NVMe tier that takes writes: here what leaves"
                " DRAM is gone; leave it out, or say --evict all",
                code="no_nvme",
            )
        self._left_before = _left_for_room(tiers)
        self._not_admitted = -1  # what NVMe lacks from before must not leave DRAM either
        spaces = [each.fields for each in client.namespaces()]
        self._page_sizes = len({_slot_bytes(each["shards"], each["page_bytes"]) for each in spaces})
        self._zombies = 0  # that nobody gave back in the time that we gave
        self._bytes = 0
        self._pages = 0

    def look(self) -> None:
        """Where there is room, as settle(), and there is none where that is false. Waits until the
        write queue is short, but not for a disk that stands still; and where room is short, for
        what a clear has taken out and the daemon has yet to give back."""
        settled = min(self._free(self._client.status()["core"])) <= 0 or self.settle()
        status = self._wait(_queue_is_long, _QUEUE_WAIT_S)
        if self._gives_back(status):
            status = self._wait(self._gives_back, _ZOMBIES_WAIT_S)
            self._zombies = status["tiers"]["dram"]["zombie_slots"]
        self._bytes, self._pages = self._free(status) if settled else (0, 0)

    def _wait(self, holds: Callable[[dict[str, Any]], bool], most_s: float) -> dict[str, Any]:
        """While that holds, of the core's status; returns the last."""
        until_s = self._clock() + most_s
        status: dict[str, Any] = self._client.status()["core"]
        while holds(status) and self._clock() < until_s:
            self._sleep(_LOOK_S)
            status = self._client.status()["core"]
        return status

    def settle(self) -> bool:
        """Where DRAM makes room, waits until NVMe has, or has queued, all that it did not take when
        it was stored: what is queued does not leave DRAM. False: it still has not."""
        if self._may_leave != "dram":
            return True
        not_admitted = _not_admitted(self._client.status()["core"]["tiers"])
        until_s = self._clock() + _QUEUE_WAIT_S
        while not_admitted != self._not_admitted:
            if not self._client.flush(_QUEUE_WAIT_S).not_admitted:
                self._not_admitted = not_admitted
            elif self._clock() >= until_s:
                return False
            else:
                self._sleep(_LOOK_S)
        return True

    def _gives_back(self, status: dict[str, Any]) -> bool:
        # Those beyond are of readers who hold on to them.
        more = status["tiers"]["dram"]["zombie_slots"] > self._zombies
        return bool(more and self._free(status)[0] < _ZOMBIES_ROOM_BYTES)

    def take(self, pages: int, shards: int, shard_bytes: int) -> int:
        """How many of so many pages there is room for, since the last look."""
        slot_bytes = _slot_bytes(shards, shard_bytes)
        taken = max(0, min(pages, self._bytes // slot_bytes, self._pages))
        self._bytes -= taken * slot_bytes
        self._pages -= taken
        return taken

    def _free(self, status: dict[str, Any]) -> tuple[int, int]:
        if self._may_leave == "all":
            return _ENDLESS, _ENDLESS
        tiers, index = status["tiers"], status["index"]
        size_bytes = _ENDLESS
        for tier, left in _left_for_room(tiers).items():
            if tier == "dram" and self._may_leave == "dram":
                continue
            free = 0 if left > self._left_before[tier] else self._free_of(tier, tiers[tier])
            size_bytes = min(size_bytes, free)
        pages = index["capacity"] - index["pages"] - index["capacity"] // _INDEX_SHARE
        return size_bytes, pages

    def _free_of(self, name: str, tier: dict[str, Any]) -> int:
        capacity_bytes = tier["capacity_bytes"]
        if name == "dram":
            # Slabs have slots of one size, and of each size one may be used in part.
            slabs = self._page_sizes * min(_SLAB_BYTES, capacity_bytes // _SLAB_SHARE)
            kept = max(slabs, capacity_bytes // _DRAM_SHARE)
            return int(capacity_bytes - tier["used_bytes"] - kept)
        if tier["health"] != "ok":
            return _ENDLESS  # nothing is written to it, and so nothing leaves it
        segment_bytes = capacity_bytes // max(1, tier["segments"])
        free = (tier["free_segments"] - _SPARE_SEGMENTS) * segment_bytes
        return int(free - tier["queued_bytes"])


def _slot_bytes(shards: int, shard_bytes: int) -> int:
    return shards * -(-shard_bytes // _BLOCK) * _BLOCK


def _left_for_room(tiers: dict[str, Any]) -> dict[str, int]:
    """Pages that left each tier that there is."""
    there = [name for name in ("dram", "nvme") if tiers[name]["capacity_bytes"]]
    return {name: sum(tiers[name]["left"].get(why, 0) for why in _FOR_ROOM) for name in there}


def _not_admitted(tiers: dict[str, Any]) -> int:
    """Pages that NVMe's queue did not take when they were stored, or lost, whoever stored them."""
    return sum(tiers["nvme"]["not_admitted"].values())


def _queue_is_long(status: dict[str, Any]) -> bool:
    tiers = status["tiers"]
    most_bytes = min(QUEUE_BYTES, tiers["dram"]["capacity_bytes"] // _QUEUE_SHARE)
    return bool(tiers["nvme"]["health"] == "ok" and tiers["nvme"]["queued_bytes"] > most_bytes)
