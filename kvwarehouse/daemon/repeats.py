"""Holds back what a log would say over and over. Not thread-safe; whoever has one locks around it.

An event is the same as another if it has the same name and the same reason. The first BURST of them
are said as they come; after that one line every TOLD_EVERY_S says how many there were, with the
fields of the last. Whoever makes none of them for so long begins anew. Memory is bounded: names
are of closed sets, and of one name OF_A_NAME reasons are told apart, the rest together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

TOLD_EVERY_S: Final = 10.0
"""Between two lines of one kind, at least, where whoever makes it happen decides how often."""

BURST: Final = 16

OF_A_NAME: Final = 8

_REASON_FIELDS: Final = ("reason", "error", "code", "why", "method", "tier")
_REASON_CHARS: Final = 200


@dataclass
class _Kind:
    since_s: float
    said: int = 0
    held: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)


class Repeats:
    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], _Kind] = {}  # by name and reason
        self._reasons: Counter[str] = Counter()  # of a name, that are told apart now

    def __len__(self) -> int:
        """Kinds that are remembered."""
        return len(self._kinds)

    def admits(self, name: str, fields: Mapping[str, Any], now_s: float) -> bool:
        """Whether the event is to be said now. Otherwise it is counted, and `due` says it."""
        kind = self._kind_of(name, fields, now_s)
        if not kind.held and now_s - kind.since_s >= TOLD_EVERY_S:
            kind.since_s, kind.said = now_s, 0
        if kind.said < BURST:
            kind.said += 1
            return True
        kind.held += 1
        kind.last = fields
        return False

    def due(self, now_s: float, *, everything: bool = False) -> list[tuple[str, dict[str, Any]]]:
        """What is to be said of those held back, as (name, fields): `more` is how many they are.
        everything: also of kinds that were told a moment ago."""
        told = []
        for key, kind in list(self._kinds.items()):
            if not everything and now_s - kind.since_s < TOLD_EVERY_S:
                continue
            if kind.held:
                told.append((key[0], {**kind.last, "more": kind.held}))
                kind.since_s, kind.held, kind.last = now_s, 0, {}
            else:
                self._forget(key)
        return told

    def _kind_of(self, name: str, fields: Mapping[str, Any], now_s: float) -> _Kind:
        reason = " ".join(str(fields[each]) for each in _REASON_FIELDS if each in fields)
        key = (name, reason[:_REASON_CHARS])
        if key not in self._kinds and self._reasons[name] >= OF_A_NAME:
            key = (name, "*")
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(now_s)
            self._reasons[name] += 1
        return kind

    def _forget(self, key: tuple[str, str]) -> None:
        del self._kinds[key]
        self._reasons[key[0]] -= 1
        if not self._reasons[key[0]]:
            del self._reasons[key[0]]


_What = TypeVar("_What")


class SeldomTold(Generic[_What]):
    """Counts what clients make happen, of few kinds, until it is told: each kind at most once in
    TOLD_EVERY_S. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[_What] = Counter()
        self._told_at: dict[_What, float] = {}

    def count(self, what: _What) -> None:
        self._counts[what] += 1

    def due(self, now_s: float) -> list[tuple[_What, int]]:
        """What is to be told now, and how often it happened since it was told last."""
        never = now_s - TOLD_EVERY_S
        due = [
            what for what in self._counts if now_s - self._told_at.get(what, never) >= TOLD_EVERY_S
        ]
        self._told_at.update(dict.fromkeys(due, now_s))
        return [(what, self._counts.pop(what)) for what in due]
