"""What LMCache has locked: chunks that a lookup found stay in DRAM until each was unlocked.

A lookup's chunks are held together: their pins end with the last of them, or after a bounded time,
for LMCache forgets locks of requests that it gives up between lookup and answer.

Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Protocol

# A chunk costs some 100 bytes here; beyond, chunks are found and not held.
_MOST_LOCKS = 1 << 18


class Held(Protocol):
    """kvwarehouse.client's Pins."""

    def release(self) -> None: ...


class _Hold:
    """Of one lookup."""

    def __init__(self, keys: Collection[Hashable], held: Sequence[Held], ends_s: float) -> None:
        self.keys = list(keys)
        self.left = len(self.keys)
        self.held = held
        self.ends_s = ends_s


class Locks:
    """lasts_s: of a lock that is not given back. clock: seconds, monotonic."""

    def __init__(self, lasts_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lasts_s = lasts_s
        self._clock = clock
        self._lock = threading.Lock()
        self._holds: dict[Hashable, deque[_Hold]] = {}
        self._in_order: deque[_Hold] = deque()  # of their ends
        self._total = 0

    @property
    def total(self) -> int:
        """Chunks locked, each as often as it is."""
        return self._total

    def take(self, keys: Collection[Hashable], held: Sequence[Held]) -> bool:
        """Locks each once; `held` is released with the last of them. False, and released at once,
        where that would be over the bound."""
        if not keys:
            _release(held)
            return True
        with self._lock:
            fits = self._total + len(keys) <= _MOST_LOCKS
            if fits:
                self._add(_Hold(keys, held, self._clock() + self._lasts_s))
        if not fits:
            _release(held)
        return fits

    def give_back(self, keys: Collection[Hashable]) -> None:
        """Unlocks each once; one that is not locked (any more) is none."""
        ended: list[_Hold] = []
        with self._lock:
            for key in keys:
                holds = self._holds.get(key)
                if holds is None:
                    continue
                hold = holds.popleft()
                if not holds:
                    del self._holds[key]
                self._total -= 1
                hold.left -= 1
                if not hold.left:
                    ended.append(hold)
                    hold.keys = []
            while self._in_order and not self._in_order[0].left:
                self._in_order.popleft()
        for hold in ended:
            _release(hold.held)

    def count(self, key: Hashable) -> int:
        """How often it is locked."""
        with self._lock:
            return len(self._holds.get(key, ()))

    def expire(self) -> int:
        """Ends locks that were held too long; returns how many chunks' they were."""
        return self._end_until(self._clock())

    def clear(self) -> None:
        self._end_until(float("inf"))

    def _add(self, hold: _Hold) -> None:
        for key in hold.keys:
            self._holds.setdefault(key, deque()).append(hold)
        self._in_order.append(hold)
        self._total += hold.left

    def _end_until(self, now_s: float) -> int:
        ended: list[_Hold] = []
        with self._lock:
            before = self._total
            while self._in_order and self._in_order[0].ends_s <= now_s:
                hold = self._in_order.popleft()
                if hold.left:
                    ended.append(hold)
                    self._forget(hold)
            count = before - self._total
        for hold in ended:
            _release(hold.held)
        return count

    def _forget(self, hold: _Hold) -> None:
        for key in hold.keys:
            holds = self._holds.get(key)
            if holds is None or hold not in holds:
                continue  # given back before
            holds.remove(hold)
            if not holds:
                del self._holds[key]
        self._total -= hold.left
        hold.left = 0


def _release(held: Sequence[Held]) -> None:
    for one in held:
        one.release()
