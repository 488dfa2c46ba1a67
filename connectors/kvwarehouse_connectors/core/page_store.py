"""Pages in the warehouse, for engines that ask for them by key: which are there, loads, stores.

Nothing here raises for what the warehouse does: a daemon that is absent, stopped, full or replaced
is a miss, or a page that was not stored, and the engine counts why. Each call is bounded by its
timeout. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection

LOOKUP_KEYS = 16_384
"""Of one lookup; the client takes up to 65,536."""


class Keys(Protocol):
    """Keys of pages as the engine passes them."""

    def __len__(self) -> int: ...
    def runs(self) -> list[kvw.KeyRun]: ...


class PageStore:
    """Engines derive from it: they know which namespace pages belong to, in what memory they lie,
    and how long somebody waits for them."""

    def __init__(self, connection: DaemonConnection) -> None:
        self._connection = connection

    @property
    def alive(self) -> bool:
        """Whether a daemon beats now: one that is stopped serves what is in DRAM, and nothing
        else."""
        return self._connection.control() is not None

    def _tiers(self, space: kvw.Namespace, keys: Keys, *, counted: bool) -> NDArray[np.uint8]:
        """kvw.Tier of each page. Reads shared memory, no call. counted: in the daemon's hits."""
        runs = keys.runs()
        return self._connection.call_or(
            space,
            lambda opened: opened.tiers(keys=runs, counted=counted),
            np.zeros(len(keys), np.uint8),
        )

    def _reachable(self, tiers: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Of each page, whether a load may expect it now: what is on NVMe or in the remote store
        only comes while the daemon is alive."""
        return tiers != kvw.Tier.MISSING if self.alive else kvw.Tier.near(tiers)

    def _pin(self, space: kvw.Namespace, keys: Keys, timeout_s: float = 0.0) -> kvw.Pins | None:
        """Of the first pages, as far as they are in DRAM, or come there in time; None where nothing
        can be pinned."""
        nothing: kvw.Pins | None = None
        return self._connection.call_or(
            space, lambda opened: opened.pin(keys=keys.runs(), timeout_s=timeout_s), nothing
        )

    def _load(
        self,
        space: kvw.Namespace,
        keys: Keys,
        out: Callable[[], kvw.Regions],
        timeout_s: float,
        shard: int = 0,
    ) -> kvw.Loaded:
        """out: the memory to fill, of one piece for each key."""
        return self._connection.call_or(
            space,
            lambda opened: opened.load(
                keys=keys.runs(), out=out(), shard=shard, timeout_s=timeout_s
            ),
            kvw.Loaded(0, {"unreachable": len(keys)}),
        )

    def _store(
        self,
        space: kvw.Namespace,
        keys: Keys,
        pages: Callable[[], kvw.Regions],
        timeout_s: float,
        shard: int = 0,
    ) -> kvw.StoreResult:
        """pages: the memory to store, of one piece for each key."""
        return self._connection.call_or(
            space,
            lambda opened: opened.store(
                keys=keys.runs(), pages=pages(), shard=shard, timeout_s=timeout_s
            ),
            kvw.StoreResult(0, 0, {"unreachable": len(keys)}),
        )


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
