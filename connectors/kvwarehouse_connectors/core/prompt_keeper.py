"""Has the warehouse keep what requests stored, as they wish it.

What a request stored is there some steps after it ended, and a keep holds what is there: so it is
asked for again, for a few seconds, until all of it is. In a thread of its own, which begins with
the first wish: a keep may wait for NVMe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection

_log = logging.getLogger(__name__)

# Wishes that wait, the oldest of which are given up beyond that.
_MOST_WISHES = 1024
# From one look at what a wish still lacks to the next, and how long that goes on.
_PAUSE_S = 0.25
_PATIENCE_S = 10.0


@dataclass
class KeepPart:
    """Of one namespace: keys, one a page of a prompt from its first on; or KeyRuns, each of a page
    that stands alone."""

    namespace_id: bytes
    keys: Sequence[bytes] | Sequence[kvw.KeyRun]
    pages: int = 0
    """That are kept so far."""


@dataclass
class KeepWish:
    name: str
    ttl_s: float
    parts: Sequence[KeepPart]
    until_s: float = field(default_factory=lambda: time.monotonic() + _PATIENCE_S)


class PromptKeeper:
    """Thread-safe. counts: "kept_blocks", of wishes that are done with, and "keep_failures"."""

    def __init__(self, connection: DaemonConnection) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._wishes: deque[KeepWish] = deque()
        self._counts: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._closed = False

    def keep(self, wish: KeepWish) -> None:
        """Never blocks."""
        with self._changed:
            if self._closed:
                return
            self._wishes.append(wish)
            if len(self._wishes) > _MOST_WISHES:
                self._wishes.popleft()
                self._counts["keep_failures"] += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvw-keeper", daemon=True)
                self._thread.start()
            self._changed.notify()

    def take_counts(self) -> dict[str, int]:
        """Since the last call. Never blocks."""
        if not self._counts:
            return {}
        with self._changed:
            taken, self._counts = self._counts, Counter()
        return dict(taken)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wishes)
                if self._closed:
                    return
                wishes = [self._wishes.popleft() for _ in range(len(self._wishes))]
            again = [wish for wish in wishes if not self._is_done(wish)]
            with self._changed:
                self._wishes.extendleft(reversed(again))
                if again:
                    self._changed.wait_for(lambda: self._closed, _PAUSE_S)

    def _is_done(self, wish: KeepWish) -> bool:
        try:
            for part in wish.parts:
                if part.pages < len(part.keys):
                    part.pages = self._kept(wish, part)
            complete = all(part.pages == len(part.keys) for part in wish.parts)
        except kvw.WarehouseError as error:
            _log.debug("what a request wished is not kept: %s", error)
            self._count("keep_failures", 1)
            return True
        except Exception:  # noqa: BLE001 - a thread's edge: the next wish may succeed
            _log.exception("kvwarehouse: what a request wished could not be kept")
            self._count("keep_failures", 1)
            return True
        if not complete and time.monotonic() < wish.until_s:
            return False
        self._count("kept_blocks", sum(part.pages for part in wish.parts))
        return True

    def _kept(self, wish: KeepWish, part: KeepPart) -> int:
        client = self._connection.client
        if client is None:
            return part.pages
        return client.keep(
            part.namespace_id, keys=part.keys, ttl_s=wish.ttl_s, name=wish.name
        ).pages

    def _count(self, name: str, amount: int) -> None:
        with self._changed:
            self._counts[name] += amount
