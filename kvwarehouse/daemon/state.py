"""What the daemon is doing, and who wants to know when that changes. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum


class State(StrEnum):
    RECOVERING = "recovering"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """Moves forward: recovering, serving, draining, stopped; but for `resume`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = State.RECOVERING
        self._listeners: list[Callable[[State], None]] = []

    @property
    def state(self) -> State:
        return self._state

    def listen(self, listener: Callable[[State], None]) -> None:
        """`listener` is called with every later state, in their order, by the thread that makes the
        change; others that make one wait for it."""
        with self._lock:
            self._listeners.append(listener)

    def advance(self, state: State) -> bool:
        """Whether that was a change; an earlier state is not gone back to."""
        order = list(State)
        return self._change(state, order[: order.index(state)])

    def resume(self) -> bool:
        """From draining back to serving; whether that was a change."""
        return self._change(State.SERVING, [State.DRAINING])

    def _change(self, state: State, of: list[State]) -> bool:
        with self._lock:
            if self._state not in of:
                return False
            self._state = state
            for listener in self._listeners:  # here: in the order of the changes
                listener(state)
        return True
