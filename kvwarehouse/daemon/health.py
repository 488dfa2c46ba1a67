"""What the daemon is doing, who wants to know when that changes, and the standard gRPC health
service, which follows it. Thread-safe; a watcher holds its thread, and nobody waits for one that
does not read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final

import grpc
from grpc_health.v1 import (  # type: ignore[import-untyped, unused-ignore]
    health_pb2,
    health_pb2_grpc,
)

from kvwarehouse.wire import SERVICE_NAME

_SERVICES: Final = ("", SERVICE_NAME)
_WAIT_S: Final = 0.5


class DaemonState(StrEnum):
    RECOVERING = "recovering"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """Moves forward: recovering, serving, draining, stopped; but for `resume`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = DaemonState.RECOVERING
        self._listeners: list[Callable[[DaemonState], None]] = []

    @property
    def state(self) -> DaemonState:
        return self._state

    def listen(self, listener: Callable[[DaemonState], None]) -> None:
        """`listener` is called with every later state, in their order, by the thread that makes the
        change; others that make one wait for it."""
        with self._lock:
            self._listeners.append(listener)

    def advance(self, state: DaemonState) -> bool:
        """Whether that was a change; an earlier state is not gone back to."""
        order = list(DaemonState)
        return self._change(state, order[: order.index(state)])

    def resume(self) -> bool:
        """From draining back to serving; whether that was a change."""
        return self._change(DaemonState.SERVING, [DaemonState.DRAINING])

    def _change(self, state: DaemonState, of: list[DaemonState]) -> bool:
        with self._lock:
            if self._state not in of:
                return False
            self._state = state
            for listener in self._listeners:  # here: in the order of the changes
                listener(state)
        return True


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc, unused-ignore]
    """SERVING while the daemon takes stores and loads, NOT_SERVING before and from a drain on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.follow(DaemonState.RECOVERING)

    def follow(self, state: DaemonState) -> None:
        """A listener of Lifecycle."""
        statuses = health_pb2.HealthCheckResponse
        with self._changed:
            self._status = (
                statuses.SERVING if state is DaemonState.SERVING else statuses.NOT_SERVING
            )
            self._changed.notify_all()

    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:
        status = self._status_of(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            return health_pb2.HealthCheckResponse()
        return health_pb2.HealthCheckResponse(status=status)

    def List(self, request: Any, context: grpc.ServicerContext) -> Any:
        status = health_pb2.HealthCheckResponse(status=self._status_of(""))
        return health_pb2.HealthListResponse(statuses=dict.fromkeys(_SERVICES, status))

    def Watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        said = None
        while context.is_active():
            status = self._status_of(request.service, other_than=said)
            if status != said:
                said = status
                yield health_pb2.HealthCheckResponse(status=status)

    def _status_of(self, service: str, other_than: Any = None) -> Any:
        """Waits _WAIT_S at most for one that is other than this."""

        def now() -> Any:
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            return self._status if service in _SERVICES else unknown

        with self._changed:
            self._changed.wait_for(lambda: now() != other_than, _WAIT_S)
            return now()
