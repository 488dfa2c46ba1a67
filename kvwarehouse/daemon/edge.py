"""Where a call enters: errors become status codes, slow calls are bounded, streams are watched.

An interceptor of every server, so that the service itself only computes answers. Thread-safe.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeAlias

import grpc

from kvwarehouse.daemon.deadline import LONGEST_STREAM_S, LONGEST_WATCH_S, Deadline
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.refusals import Refusals
from kvwarehouse.daemon.watchdog import Watchdog, Watched
from kvwarehouse.errors import CapacityError, InternalError, WarehouseError
from kvwarehouse.wire import DETAIL_KEY, SERVICE_NAME, error_to_detail, status_of

SLOW_CALLS: Final = 8
"""Administration that waits or works for long, at a time; the rest of the threads stays free."""

WATCHES: Final = 8
"""Watchers at a time, each with a thread and up to 16 MiB of the core for what it has not read."""

_SLOW: Final = frozenset({"Clear", "Evict", "Flush", "Drain", "Sweep", "Check"})
_WATCH: Final = "Watch"
_REFLECTION: Final = "/grpc.reflection."

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behavior: TypeAlias = Callable[[Any, grpc.ServicerContext], Any]


class Edge(grpc.ServerInterceptor):
    def __init__(self, log: Log, watchdog: Watchdog, refusals: Refusals) -> None:
        self._log = log
        self._refusals = refusals
        self._watchdog = watchdog
        self._slow = threading.BoundedSemaphore(SLOW_CALLS)
        self._watches = threading.BoundedSemaphore(WATCHES)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not self._is_ours(method):
            return handler
        return self._wrapped(handler, method)

    @staticmethod
    def _is_ours(method: str) -> bool:
        # Health is the library's own, answers at once and does not hold threads; reflection holds
        # one for as long as its client likes, so it is watched and bounded as our streams are.
        return method.startswith((f"/{SERVICE_NAME}/", _REFLECTION))

    def _wrapped(self, handler: Handler, method: str) -> Handler:
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.request_streaming and handler.response_streaming:
            streams = self._streaming(handler.stream_stream, method, requests=True)
            return grpc.stream_stream_rpc_method_handler(streams, *codecs)
        if handler.request_streaming:
            unary = self._unary(handler.stream_unary, method, requests=True)
            return grpc.stream_unary_rpc_method_handler(unary, *codecs)
        if handler.response_streaming:
            streams = self._streaming(handler.unary_stream, method, requests=False)
            return grpc.unary_stream_rpc_method_handler(streams, *codecs)
        unary = self._unary(handler.unary_unary, method, requests=False)
        return grpc.unary_unary_rpc_method_handler(unary, *codecs)

    def _unary(self, behavior: Behavior | None, method: str, *, requests: bool) -> Behavior:
        assert behavior is not None

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                with self._place(method):
                    if not requests:
                        return behavior(request, context)
                    with self._watched(context, method) as stream:
                        return behavior(_following(request, stream), context)
            except Exception as error:  # noqa: BLE001  the edge of the RPC
                self._refuse(context, method, error)

        return call

    def _streaming(self, behavior: Behavior | None, method: str, *, requests: bool) -> Behavior:
        assert behavior is not None

        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                with self._place(method), self._watched(context, method) as stream:
                    source = _following(request, stream) if requests else request
                    for answer in behavior(source, context):
                        with stream.client_turn():
                            yield answer
            except Exception as error:  # noqa: BLE001  the edge of the RPC
                self._refuse(context, method, error)

        return call

    @contextmanager
    def _place(self, method: str) -> Iterator[None]:
        name = method.rpartition("/")[2]
        if name == _WATCH:
            places, code, text = self._watches, "too_many_watchers", f"{WATCHES} watchers are there"
        elif name in _SLOW or method.startswith(_REFLECTION):
            places, code = self._slow, "too_many_calls"
            text = f"{SLOW_CALLS} administrative calls are under way"
        else:
            yield
            return
        if not places.acquire(blocking=False):
            raise CapacityError(
                f"{text}, the bound; try {name} again when one has ended", code=code
            )
        try:
            yield
        finally:
            places.release()

    @contextmanager
    def _watched(self, context: grpc.ServicerContext, method: str) -> Iterator[Watched]:
        if method.endswith(f"/{_WATCH}"):
            deadline = Deadline.of(context, LONGEST_WATCH_S, default_s=LONGEST_WATCH_S)
        else:
            deadline = Deadline.of(context, LONGEST_STREAM_S)
        with self._watchdog.watch(context, deadline, method) as stream:
            yield stream

    def _refuse(self, context: grpc.ServicerContext, method: str, error: Exception) -> NoReturn:
        if not isinstance(error, WarehouseError):
            if not context.is_active():
                raise error  # the call is over: gRPC's own way of ending the thread
            self._log.event(
                Event.RPC_FAILED, method=method, error=repr(error), trace=traceback.format_exc(8)
            )
            error = InternalError(f"{method} failed: {error!r}; the daemon's log has the trace")
        if isinstance(error, CapacityError):
            self._refusals.count(error.code, context.peer())
        context.set_trailing_metadata(((DETAIL_KEY, error_to_detail(error)),))
        context.abort(status_of(error), error.message)


def _following(requests: Iterator[Any], stream: Watched) -> Iterator[Any]:
    while True:
        with stream.client_turn():
            request = next(requests, None)
        if request is None:
            return
        yield request
