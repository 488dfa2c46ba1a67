"""What a storage backend did, for people and for SGLang's metrics.

Thread-safe.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvwarehouse_connectors.core.page_store import ReasonCounts

# SGLang takes them every few steps; without its metrics nobody does.
_KEPT_CALLS = 1024


@dataclass
class Calls:
    """One entry a call since the last time: pages moved, and GiB a second."""

    pages: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_CALLS))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_CALLS))

    def add(self, pages: int, size_bytes: int, seconds: float) -> None:
        self.pages.append(pages)
        if seconds > 0:
            self.rates.append(size_bytes / seconds / 2**30)


class Counts(ReasonCounts):
    """NAME_pages of what was found (hit), loaded, promised and not loaded (missed), stored, there
    already, and not stored (dropped); `dropped.REASON` and `missed.REASON` say why."""

    def __init__(self) -> None:
        super().__init__("pages")
        self._loads = Calls()
        self._stores = Calls()

    def loaded(self, pages: int, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._totals.update(loaded_pages=pages, loaded_bytes=size_bytes)
            self._loads.add(pages, size_bytes, seconds)

    def stored(self, pages: int, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._totals.update(stored_pages=pages, stored_bytes=size_bytes)
            self._stores.add(pages, size_bytes, seconds)

    def take_calls(self) -> tuple[Calls, Calls]:
        """Loads and stores since the last time."""
        with self._lock:
            taken = self._loads, self._stores
            self._loads, self._stores = Calls(), Calls()
            return taken
