"""What an adapter did, for people: LMCache shows it in its /status.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class Counts:
    """NAME_chunks of what was found, held (pinned) of these, loaded, not loaded (missed), stored,
    there already, and not stored (dropped); `missed.REASON` and `dropped.REASON` say why."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def add(self, **chunks: int) -> None:
        with self._lock:
            self._totals.update(chunks)

    def why(self, name: str, reasons: Mapping[str, int]) -> None:
        """name: missed or dropped. reasons: chunks by reason."""
        if not reasons:
            return
        with self._lock:
            self._totals[f"{name}_chunks"] += sum(reasons.values())
            self._totals.update({f"{name}.{why}": chunks for why, chunks in reasons.items()})

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)
