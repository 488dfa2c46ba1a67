"""The standard gRPC health service, following the daemon's state. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2  # type: ignore[import-untyped, unused-ignore]

from kvwarehouse.daemon.state import State
from kvwarehouse.wire import SERVICE_NAME

WATCHERS_MAX: Final = 256
"""Health watches at a time. They hold no threads, only a little memory each."""


class Health(health.HealthServicer):  # type: ignore[misc, unused-ignore]
    """SERVING while the daemon takes stores and loads, NOT_SERVING before and from a drain on."""

    def __init__(self) -> None:
        super().__init__(experimental_non_blocking=True)
        self._count_lock = threading.Lock()
        self._watchers = 0
        self.follow(State.RECOVERING)

    def follow(self, state: State) -> None:
        """A listener of Lifecycle."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if state is State.SERVING else statuses.NOT_SERVING
        for service in ("", SERVICE_NAME):
            self.set(service, status)

    def Watch(
        self,
        request: Any,
        context: grpc.ServicerContext,
        send_response_callback: Callable[[Any], None],
    ) -> None:
        with self._count_lock:
            full = self._watchers >= WATCHERS_MAX
            self._watchers += not full
        if full:
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            context.set_details(f"{WATCHERS_MAX} health watches are open, the bound; use Check")
            send_response_callback(None)
            return
        if not context.add_callback(self._watch_ended):
            self._watch_ended()
        super().Watch(request, context, send_response_callback)

    def _watch_ended(self) -> None:
        with self._count_lock:
            self._watchers -= 1
