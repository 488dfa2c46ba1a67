"""Which states of the store become events of the log."""

from __future__ import annotations

import pytest

from kvwarehouse.remote.report import WorkerReport
from kvwarehouse.remote.state_events import LASTS_S, StateEvents
from testkit.timed_store import HostClock


class Told:
    def __init__(self) -> None:
        self.clock, self.lines = HostClock(), list[tuple[str, dict[str, object]]]()
        self._events = StateEvents(self.clock)

    def goes(self, state: str, seconds: float, reason: str = "") -> None:
        """It is said each second that the store is in that state."""
        for _ in range(int(seconds)):
            event = self._events.of(WorkerReport(state, reason))
            if event is not None:
                self.lines.append((event.event, dict(event.fields)))
            self.clock.now_s += 1


@pytest.fixture
def told() -> Told:
    return Told()


def test_state_that_lasts_is_told_once(told: Told) -> None:
    told.goes("starting", 100, "the store is being opened")
    told.goes("serving", 100)
    told.goes("failing", 100, "no answer")
    told.goes("serving", 100)
    assert told.lines == [
        ("remote_serving", {}),
        ("remote_failing", {"text": "no answer"}),
        ("remote_serving", {}),
    ]


def test_state_is_not_told_before_it_has_lasted(told: Told) -> None:
    told.goes("serving", LASTS_S)
    assert told.lines == []
    told.goes("serving", 1)
    assert [name for name, _ in told.lines] == ["remote_serving"]


def test_states_that_change_every_few_seconds_are_not_told(told: Told) -> None:
    """Incident: ten lines a minute of a store that did not list."""
    told.goes("failing", 60)
    for _ in range(100):
        told.goes("starting", 3)
        told.goes("failing", 3)
        told.goes("serving", 2)
    told.goes("failing", 60)
    assert [name for name, _ in told.lines] == ["remote_failing"]
