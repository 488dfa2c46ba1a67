"""What a worker has to tell: loads that ended, blocks that were stored, counts. Taken with each
step.

Thread-safe: the loading and storing threads put, the engine's takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvwarehouse_connectors.vllm.messages import StepResults
from kvwarehouse_connectors.vllm.stats import WarehouseStats
from kvwarehouse_connectors.vllm.weights_watch import WeightsNews


class Results:
    """Everything is since it was last taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._step_results = StepResults()
        self._stats = WarehouseStats.empty()

    # -- put

    def ended(self, request_id: str, *, complete: bool, whole: bool, bad: Iterable[int]) -> None:
        """A request's load ended. complete: all of it came. Else it is computed: as a whole, or
        from the first of the blocks `bad` on."""
        with self._lock:
            self._received.add(request_id)
            if complete:
                return
            self._step_results.failed.add(request_id)
            if whole:
                self._failed.add(request_id)
            else:
                self._bad_blocks.update(bad)

    def delivered(self, bytes_per_s: float, *, from_nvme: bool) -> None:
        """How fast a load was."""
        with self._lock:
            if from_nvme:
                self._step_results.nvme_bytes_per_s = bytes_per_s
            else:
                self._step_results.load_bytes_per_s = bytes_per_s

    def stored(self, blocks: Iterable[tuple[int, bytes]], ranks: int = 1) -> None:
        """Blocks that are stored now, by group and key; ranks: of how many that is known."""
        with self._lock:
            self._step_results.stored.update(dict.fromkeys(blocks, ranks))

    def saw(self, weights: WeightsNews) -> None:
        """What became of the engine's weights."""
        with self._lock:
            told = self._step_results
            told.weights = told.weights.and_also(weights)

    def count(self, **amounts: int) -> None:
        """Adds to counters of stats.py."""
        with self._lock:
            for name, amount in amounts.items():
                self._stats.add(name, amount)

    # -- take

    def take_requests(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended, and those of them that failed as a whole."""
        with self._lock:
            taken = self._received, self._failed
            self._received, self._failed = set(), set()
        return taken

    def take_bad_blocks(self) -> set[int]:
        with self._lock:
            taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    def take_step_results(self) -> StepResults | None:
        with self._lock:
            taken, self._step_results = self._step_results, StepResults()
        return taken if taken else None

    def take_stats(self) -> WarehouseStats | None:
        with self._lock:
            if self._stats.is_empty():
                return None
            taken, self._stats = self._stats, WarehouseStats.empty()
        return taken
