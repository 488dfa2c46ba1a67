"""The file `presence`, from the day on that the store's clock has said. Before that nobody knows
which of its days count, and nothing asks it. Thread-safe: one thread opens it, by `advance`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvwarehouse.core import PresenceFile


class LatePresence:
    """`make`: the file, of its newest day."""

    def __init__(self, make: Callable[[int], PresenceFile]) -> None:
        self._make = make
        self._file: PresenceFile | None = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def advance(self, newest: int, today: int) -> None:
        file = self._file or self._make(newest)
        file.advance(newest, today)
        self._file = file

    def put(self, keys: bytes, epochs: Any, days: Any) -> dict[str, int]:
        return self._opened.put(keys, epochs, days)

    def remove(self, key: bytes, epoch: int, day: int) -> bool:
        return self._opened.remove(key, epoch, day)

    def day_of(self, key: bytes, epoch: int) -> int | None:
        return self._opened.day_of(key, epoch)

    @property
    def _opened(self) -> PresenceFile:
        assert self._file is not None, "the store's day is not known yet"
        return self._file
