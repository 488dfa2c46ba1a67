"""How much of a workload: requests, time. Stateless; thread-safe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvwarehouse.workloads.agents import AgentSession
from kvwarehouse.workloads.call import Call


@dataclass(frozen=True)
class Bounds:
    """None: no bound."""

    requests: int | None = None
    duration_s: float | None = None


def bounded(calls: Iterable[Call], bounds: Bounds) -> Iterator[Call]:
    for number, call in enumerate(calls, start=1):
        if bounds.duration_s is not None and call.time_s > bounds.duration_s:
            return
        yield call
        if number == bounds.requests:
            return


def bounded_sessions(sessions: Iterable[AgentSession], bounds: Bounds) -> Iterator[AgentSession]:
    """Whole ones, until they have the requests between them."""
    requests = 0
    for session in sessions:
        yield session
        requests += len(session.flat())
        if bounds.requests is not None and requests >= bounds.requests:
            return
