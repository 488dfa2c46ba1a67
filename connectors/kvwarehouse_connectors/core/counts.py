"""Counts of what became of pages, for people and for an engine's metrics. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class ReasonCounts:
    """Totals by name; `NAME.REASON` says why pages were missed or dropped. unit: what the engine
    calls pages."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        with self._lock:
            self._totals.update(amounts)

    def why(self, name: str, reasons: Mapping[str, int]) -> None:
        """name: missed or dropped. reasons: pages by reason."""
        if not reasons:
            return
        with self._lock:
            self._totals[f"{name}_{self._unit}"] += sum(reasons.values())
            self._totals.update({f"{name}.{why}": pages for why, pages in reasons.items()})

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)
