"""What the connector counts. TensorRT-LLM has no place for a connector's figures: they are logged,
at most once a minute and at the end. Thread-safe."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

_log = logging.getLogger(__name__)
_EVERY_S = 60.0

COUNTERS = (
    "promised_tokens",  # tokens that lookups promised
    "unready_hits",  # lookups that found pages and promised none of them: NVMe, or not verified yet
    "unaligned_lookups",  # the engine had part of a block itself
    "loaded_blocks",  # loaded and verified, of this rank
    "failed_loads",  # promised and not delivered: the engine was told so by an exception
    "stored_blocks",
    "already_blocks",  # stored by somebody else meanwhile
    "dropped_blocks",  # not stored: no room, no daemon, too slow
    "held_requests",  # finished requests whose blocks were held to be copied
    "expired_holds",  # of them, those let go before all was copied
)


class Counts:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()
        self._next_s = time.monotonic() + _EVERY_S

    def add(self, name: str, amount: int = 1) -> None:
        assert name in COUNTERS, name
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        assert name in COUNTERS, name
        with self._lock:
            return self._counts[name]

    def log(self, *, now: bool = False) -> None:
        """A line, where it is time for one and something was counted since the last."""
        with self._lock:
            if not now and time.monotonic() < self._next_s:
                return
            self._next_s = time.monotonic() + _EVERY_S
            if self._counts == self._logged:
                return
            self._logged = self._counts.copy()
            shown = " ".join(f"{n}={self._counts[n]}" for n in COUNTERS if self._counts[n])
        _log.info("kvwarehouse %s: %s", self._name, shown)
