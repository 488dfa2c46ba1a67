"""Has the warehouse keep what requests stored, as they wish it.

What a request stored is there some steps after it ended, and a keep holds what is there: so it is
asked for again, a few times, until all of it is. In a thread of its own, which begins with the
first wish: a keep may wait for NVMe.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import kvwarehouse as kvw
from kvwarehouse_connectors.core.daemon_connection import DaemonConnection

_log = logging.getLogger(__name__)

# Wishes that wait, and the keys of all of them; the oldest are given up beyond that.
_MOST_WISHES = 1024
_MOST_KEYS = 1 << 20
# From one ask to the next, where something of it was missing.
_PAUSES_S = (0.25, 1.0, 3.0, 8.0)
# After so many asks one that found no more than the one before is the last.
_FEWEST_ASKS = 3


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
    """A later wish of the same name takes its place."""
    ttl_s: float
    parts: Sequence[KeepPart]
    asks: int = 0
    due_s: float = field(default_factory=time.monotonic)

    @property
    def keys(self) -> int:
        return sum(len(part.keys) for part in self.parts)

    @property
    def pages(self) -> int:
        return sum(part.pages for part in self.parts)


class _Outcome(Enum):
    DONE = auto()
    AGAIN = auto()
    REFUSED = auto()


class PromptKeeper:
    """Thread-safe. counts: "kept_blocks", of wishes that are done with, and "keep_failures", those
    of which nothing is kept."""

    def __init__(self, connection: DaemonConnection) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._wishes: dict[str, KeepWish] = {}  # by name, the oldest first
        self._keys = 0
        self._counts: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._closed = False

    def keep(self, wish: KeepWish) -> None:
        """Never blocks."""
        with self._changed:
            if self._closed:
                return
            self._drop(wish.name)
            self._wishes[wish.name] = wish
            self._keys += wish.keys
            while len(self._wishes) > _MOST_WISHES or self._keys > _MOST_KEYS:
                self._drop(next(iter(self._wishes)))
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
            self._thread.join()  # a call of the client is all that it may wait for

    def _drop(self, name: str) -> None:
        if (dropped := self._wishes.pop(name, None)) is not None:
            self._keys -= dropped.keys

    def _run(self) -> None:
        while (wish := self._next()) is not None:
            try:
                outcome = self._ask(wish)
            except Exception:  # noqa: BLE001 - a thread's edge: the next wish may succeed
                _log.exception("kvwarehouse: what a request wished could not be kept")
                outcome = _Outcome.REFUSED
            self._note(wish, outcome)

    def _next(self) -> KeepWish | None:
        """The next one whose time has come; None at the end."""
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                first = min(self._wishes.values(), key=lambda wish: wish.due_s, default=None)
                if first is not None and first.due_s <= now_s:
                    return first
                self._changed.wait(None if first is None else first.due_s - now_s)
            return None

    def _note(self, wish: KeepWish, outcome: _Outcome) -> None:
        with self._changed:
            if self._wishes.get(wish.name) is not wish:
                return  # a later one took its place, and asks for more
            if outcome is _Outcome.AGAIN:
                wish.due_s = time.monotonic() + _PAUSES_S[wish.asks - 1]
                return
            self._drop(wish.name)
            kept = wish.pages if outcome is _Outcome.DONE else 0
            self._counts["kept_blocks" if kept else "keep_failures"] += kept or 1
        if outcome is _Outcome.REFUSED:
            self._undo(wish)

    def _ask(self, wish: KeepWish) -> _Outcome:
        wish.asks += 1
        before, last = wish.pages, wish.asks > len(_PAUSES_S)
        try:
            for part in wish.parts:
                if part.pages < len(part.keys) and not self._closed:
                    part.pages = self._kept(wish, part)
        except kvw.WarehouseError as error:
            _log.debug("what a request wished is not kept: %s", error)
            final = last or not error.retryable or error.code == "keeps_full"
            return _Outcome.REFUSED if final else _Outcome.AGAIN
        stands = wish.asks >= _FEWEST_ASKS and wish.pages == before
        return _Outcome.DONE if last or stands or wish.pages == wish.keys else _Outcome.AGAIN

    def _kept(self, wish: KeepWish, part: KeepPart) -> int:
        client = self._connection.client
        if client is None:
            return part.pages
        kept = client.keep(part.namespace_id, keys=part.keys, ttl_s=wish.ttl_s, name=wish.name)
        return kept.pages

    def _undo(self, wish: KeepWish) -> None:
        """A part alone is of no use to anybody."""
        client = self._connection.client
        for part in wish.parts:
            if client is not None and part.pages:
                with contextlib.suppress(kvw.WarehouseError):
                    client.remove_keep(wish.name, part.namespace_id)
