"""How much this node may put, so that a whole fleet stays within its capacity though no node knows
what the others do meanwhile.

Each listing of the store gives a grant of

    (capacity - used) / (SHARES * living nodes)

which ends GRANT_S after its listing began. `used` is what that listing counted, and all that this
node was admitted to put since a minute before it began: a put that was under way then may have been
missed by it.

Why SHARES is 3. A grant is made on what was true up to an interval ago. With n nodes that hold
theirs to the end, spend all of it and list again one after the other, the room R goes as

    R(t) = R(t - 1/n) - R(t - 1) / (SHARES * n)         in intervals

which stays above 0 for ever where SHARES >= e (then x^n = x^(n-1) - 1 / (SHARES * n) has a solution
between 0 and 1), and falls below it after a few intervals where SHARES is 2. A grant outlives its
interval by a twelfth, so that it is 13 / 12 / 3 = 0.361 that must be at most 1 / e = 0.368.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from kvwarehouse.remote import listing

SHARES: Final = 3
GRANT_S: Final = listing.INTERVAL_S + 300.0
"""Longer than an interval by what the next listing takes."""
UNDER_WAY_S: Final = 60.0
"""A put has ended by then, with its second try."""


class Capacity:
    """`clock`: monotonic seconds. Thread-safe; never blocks."""

    def __init__(self, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity_bytes: Final = capacity_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._admitted: deque[tuple[int, int]] = deque()  # in which second, how much
        self._listed: dict[int, int] | None = None  # bytes of each day
        self._listed_s = 0.0
        self._granted = True  # for the last listing
        self._grant = 0
        self._room = 0  # of the grant
        self._room_until_s = 0.0
        self._is_full = False

    def listed(self, bytes_of_days: Mapping[int, int], began_s: float) -> None:
        """What a listing that began then has counted. The grant for it is yet to be made."""
        with self._lock:
            self._listed, self._listed_s = dict(bytes_of_days), began_s
            self._granted = False
            while self._admitted and self._admitted[0][0] + 1 < began_s - UNDER_WAY_S:
                self._admitted.popleft()

    def grant(self, living: int) -> None:
        """Once for each listing, for as many nodes as live; what is left of the last one ends."""
        with self._lock:
            if self._granted:
                return
            room = max(0, self.capacity_bytes - self._used()) // (SHARES * living)
            self._grant, self._room = room, room
            self._room_until_s = self._listed_s + GRANT_S
            self._granted, self._is_full = True, False

    def admit(self, size_bytes: int) -> bool:
        """True: so much may be put now, and counts as put, whatever becomes of it but where it is
        given back."""
        now_s = self._clock()
        with self._lock:
            if now_s >= self._room_until_s:
                return False
            self._is_full = size_bytes > self._room
            if self._is_full:
                return False
            self._room -= size_bytes
            second, before = int(now_s), 0
            if self._admitted and self._admitted[-1][0] == second:
                _, before = self._admitted.pop()
            self._admitted.append((second, before + size_bytes))
            return True

    def give_back(self, size_bytes: int) -> None:
        """So much was admitted of which nothing was sent to the store."""
        with self._lock:
            left = size_bytes
            for place in range(len(self._admitted) - 1, -1, -1):
                second, admitted = self._admitted[place]
                taken = min(left, admitted)
                self._admitted[place] = (second, admitted - taken)
                left -= taken
                if not left:
                    break
            self._room = min(self._room + size_bytes, self._grant)

    def dropped(self, day: int) -> None:
        """All of that day is deleted. That is room for the next listing's grant, and none for this
        one's: a grant more in an interval is one that the argument above does not have."""
        with self._lock:
            if self._listed is not None:
                self._listed.pop(day, None)

    @property
    def is_full(self) -> bool:
        """What a grant was last asked for was more than it had left."""
        with self._lock:
            return self._is_full

    @property
    def room_bytes(self) -> int:
        """Of the grant."""
        now_s = self._clock()
        with self._lock:
            return self._room if now_s < self._room_until_s else 0

    @property
    def used_bytes(self) -> int:
        """As far as this node knows; what others have put since the listing is not in it."""
        with self._lock:
            return self._used()

    def bytes_of_days(self, today: int) -> dict[int, int] | None:
        """What this node has put since the listing counts as of today. None: no listing yet."""
        with self._lock:
            if self._listed is None:
                return None
            days = dict(self._listed)
            days[today] = days.get(today, 0) + self._admitted_bytes()
            return days

    def _used(self) -> int:
        return sum((self._listed or {}).values()) + self._admitted_bytes()

    def _admitted_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self._admitted)
