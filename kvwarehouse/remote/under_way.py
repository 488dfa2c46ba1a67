"""The runs that get threads have taken, in the order in which they did: how many bytes of objects
are in memory at a time, and which run waits for which. Thread-safe.

Who has room in memory may wait for a run that was taken before it, which has room by then, and for
no other: so none waits for one that waits for its room.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(eq=False)
class RunTurn:
    """Of a run, by its last page."""

    key: bytes
    size_bytes: int
    has_room: bool = False


class UnderWay:
    """`limit_bytes`: of objects in memory. What is larger has it when nobody else has any."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._turns: list[RunTurn] = []  # as many as there are get threads

    def begin(self, key: bytes, size_bytes: int) -> RunTurn:
        """Behind all that have begun, until end()."""
        with self._changed:
            turn = RunTurn(key, size_bytes)
            self._turns.append(turn)
            return turn

    def end(self, turn: RunTurn) -> None:
        with self._changed:
            self._turns.remove(turn)
            self._changed.notify_all()

    def wait_for_room(self, turn: RunTurn, timeout_s: float) -> bool:
        """Until it is its turn, and its object has room in memory, until end(). False: not within
        that time; nothing is taken."""

        def is_its_turn() -> bool:
            taken_bytes = sum(each.size_bytes for each in self._turns if each.has_room)
            fits = taken_bytes + turn.size_bytes <= self._limit_bytes or taken_bytes == 0
            return fits and all(each.has_room for each in self._before(turn))

        with self._changed:
            turn.has_room = self._changed.wait_for(is_its_turn, timeout_s)
            self._changed.notify_all()  # whoever is behind may be next
            return turn.has_room

    def wait_for_end(self, key: bytes, turn: RunTurn, timeout_s: float) -> bool:
        """Until a run of that key has ended that began before `turn`. False: there is none such,
        or it goes on."""

        def has_ended() -> bool:
            return all(each.key != key for each in self._before(turn))

        with self._changed:
            return not has_ended() and self._changed.wait_for(has_ended, timeout_s)

    def _before(self, turn: RunTurn) -> list[RunTurn]:
        return self._turns[: self._turns.index(turn)]
