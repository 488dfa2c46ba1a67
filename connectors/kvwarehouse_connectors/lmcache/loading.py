"""Loads that are under way, and which of them must end because LMCache takes their memory back.

LMCache unlocks a load's chunks when it has its answer. Where it gives a request up it unlocks them
before, and gives their memory to others right after: by then nothing may write there any more. So
an unlock that leaves a chunk with fewer locks than loads ends those loads, and waits for what is
being copied at that moment. An unlock does not say whose it is: where another request has locked
the same chunks and does not load them yet, a load that was given up goes on until its deadline
(docs/lmcache.md). To end all loads of what is unlocked would close that, and cost every burst of
equal prompts its loads: the first that has its answer unlocks the chunks of them all.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable


class Load:
    """One load. Its worker writes only inside `writing`."""

    def __init__(self, keys: Collection[Hashable]) -> None:
        self.keys = keys
        self._lock = threading.Lock()
        self._ended = False

    def writing(self, write: Callable[[], None]) -> bool:
        """Runs `write`, which may fill memory until it returns; False and nothing once the load was
        ended."""
        with self._lock:
            if not self._ended:
                write()
            return not self._ended

    def end(self) -> None:
        """Blocks for the write that runs, if one does: at most a slice (page_store.py)."""
        with self._lock:
            self._ended = True


class Loading:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[Hashable, list[Load]] = {}

    def begin(self, keys: Collection[Hashable]) -> Load:
        load = Load(keys)
        with self._lock:
            for key in keys:
                self._loads.setdefault(key, []).append(load)
        return load

    def done(self, load: Load) -> None:
        with self._lock:
            for key in load.keys:
                loads = self._loads[key]
                loads.remove(load)
                if not loads:
                    del self._loads[key]

    def end_uncovered(self, keys: Iterable[Hashable], locked: Callable[[Hashable], int]) -> None:
        """Ends the loads of those keys that have fewer locks than loads. Which of several loads was
        given up cannot be told: they all end, and are misses. None ends where locks of requests
        that do not load yet are as many."""
        with self._lock:
            uncovered = [
                load
                for key in keys
                if key in self._loads and locked(key) < len(self._loads[key])
                for load in self._loads[key]
            ]
        for load in dict.fromkeys(uncovered):
            load.end()

    def end_all(self) -> None:
        with self._lock:
            loads = [load for loads in self._loads.values() for load in loads]
        for load in dict.fromkeys(loads):
            load.end()
