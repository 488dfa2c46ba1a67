"""How much of a fleet's is in its store: objects and bytes of each namespace and day."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from kvwarehouse.remote.walk import Found


@dataclass
class Total:
    objects: int = 0
    bytes: int = 0

    def add(self, objects: int, size_bytes: int) -> None:
        self.objects += objects
        self.bytes += size_bytes


class StoredTotals:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: defaultdict[tuple[bytes, int], Total] = defaultdict(Total)

    def add(self, found: Found) -> None:
        with self._lock:
            for name, size_bytes in found:
                self._of[name.namespace, name.day].add(1, size_bytes)

    def whole(self) -> Total:
        with self._lock:
            return _sum(self._of.values())

    def by_day(self) -> dict[int, Total]:
        """Sorted."""
        with self._lock:
            days = sorted({day for _, day in self._of})
            return {day: _sum(t for (_, d), t in self._of.items() if d == day) for day in days}

    def by_namespace(self) -> dict[bytes, dict[int, Total]]:
        """Namespaces and their days, sorted."""
        with self._lock:
            spaces: dict[bytes, dict[int, Total]] = {}
            for namespace, day in sorted(self._of):
                total = self._of[namespace, day]
                spaces.setdefault(namespace, {})[day] = Total(total.objects, total.bytes)
            return spaces


def _sum(totals: Iterable[Total]) -> Total:
    whole = Total()
    for total in totals:
        whole.add(total.objects, total.bytes)
    return whole
