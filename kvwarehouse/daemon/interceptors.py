"""The gRPC interceptor of every server: it bounds calls, watches their clients, and turns errors
into status codes, so that the service itself only computes answers. Thread-safe.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from kvwarehouse.daemon.admission import Connections, Quota, Quotas, Refusals, caller_of
from kvwarehouse.daemon.deadline import (
    LONGEST_CHECK_S,
    LONGEST_STREAM_S,
    LONGEST_WATCH_S,
    Deadline,
)
from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.watchdog import Watchdog, Watched
from kvwarehouse.errors import CapacityError, InternalError, UsageError, WarehouseError
from kvwarehouse.wire import DETAIL_KEY, SERVICE_NAME, error_to_detail, status_of

SLOW_CALLS: Final = 8
"""Administration that waits or works for long, at a time; the rest of the threads stays free."""

WATCHES: Final = 8
"""Watchers at a time, each with a thread and up to 16 MiB of the core for what it has not read."""

HEALTH_WATCHES: Final = 16
"""Watchers of the standard health service at a time, each with a thread."""

NOTES: Final = 4
"""Calls at a time that note what engines looked up, each of which asks the core some questions."""

KEEPS: Final = 4
"""Calls at a time that keep a prompt, each of which may wait two seconds for NVMe."""

QUICK_CALLS: Final = 12
"""Threads beside those of streams, slow calls and watchers, for calls that answer at once."""

OTHER_CALLS: Final = SLOW_CALLS + WATCHES + HEALTH_WATCHES + NOTES + KEEPS + QUICK_CALLS
"""Beside stores and loads."""

_STREAMS: Final = frozenset({"Store", "Load"})
_SLOW: Final = frozenset({"Clear", "Evict", "Flush", "Drain", "Sweep", "Check", "Why"})
_OUR_WATCH: Final = f"/{SERVICE_NAME}/Watch"
_NOTE: Final = f"/{SERVICE_NAME}/NoteRequests"
_KEEP: Final = f"/{SERVICE_NAME}/Keep"
_CHECK: Final = f"/{SERVICE_NAME}/Check"
_REFLECTION: Final = "/grpc.reflection."
_HEALTH: Final = "/grpc.health."
_HEALTH_WATCH: Final = "/grpc.health.v1.Health/Watch"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behavior: TypeAlias = Callable[..., Any]
Decode: TypeAlias = Callable[[bytes], Any]


def threads_of(streams: int) -> int:
    """Of a server that takes so many stores and loads at a time."""
    return streams + OTHER_CALLS


class CallInterceptor(grpc.ServerInterceptor):
    def __init__(
        self,
        log: Log,
        watchdog: Watchdog,
        refusals: Refusals,
        connections: Connections,
        streams: int,
    ) -> None:
        """`streams`: stores and loads at a time."""
        self._quotas = Quotas()
        self._connections = connections
        self._log = log
        self._refusals = refusals
        self._watchdog = watchdog
        threads = threads_of(streams)
        self._calls = Quota(threads, "calls", "too_many_calls")
        self._local_calls = Quota(threads, "calls over the Unix socket", "too_many_calls")
        self._slow = Quota(SLOW_CALLS, "administrative calls", "too_many_calls")
        transfers = Quota(
            streams,
            "stores and loads over gRPC",
            "too_many_streams",
            "start it with more --streams",
        )
        self._kinds = {
            _OUR_WATCH: Quota(WATCHES, "watchers", "too_many_watchers"),
            _NOTE: Quota(NOTES, "notes of requests", "too_many_calls"),
            _KEEP: Quota(KEEPS, "keeps of prompts", "too_many_calls"),
            _HEALTH_WATCH: Quota(HEALTH_WATCHES, "health watches", "too_many_watchers"),
            **{f"/{SERVICE_NAME}/{name}": self._slow for name in _SLOW},
            **{f"/{SERVICE_NAME}/{name}": transfers for name in _STREAMS},
        }

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
        # Those of the libraries too: they hold a thread for as long as their clients like.
        return method.startswith((f"/{SERVICE_NAME}/", _REFLECTION, _HEALTH))

    def _wrapped(self, handler: Handler, method: str) -> Handler:
        # All are served as if they took many messages, which is the same to their clients: gRPC
        # would wait for the only one of a call before anything of ours runs, without an end. And as
        # bytes: of one that is none gRPC would end the call beside us, and then take our end of it
        # for one that is still to leave, for good.
        decode, encode = handler.request_deserializer, handler.response_serializer
        assert decode is not None
        requests = handler.request_streaming
        if handler.response_streaming:
            behavior = handler.stream_stream if requests else handler.unary_stream
            streams = self._streaming(behavior, method, decode, requests=requests)
            return grpc.stream_stream_rpc_method_handler(streams, None, encode)
        behavior = handler.stream_unary if requests else handler.unary_unary
        unary = self._unary(behavior, method, decode, requests=requests)
        return grpc.stream_unary_rpc_method_handler(unary, None, encode)

    def _unary(
        self, behavior: Behavior | None, method: str, decode: Decode, *, requests: bool
    ) -> Behavior:
        assert behavior is not None

        def call(sent: Iterator[Any], context: grpc.ServicerContext) -> Any:
            try:
                with self._place(method, context):
                    if not requests:
                        return behavior(self._only(sent, context, method, decode), context)
                    with self._watched(context, method) as stream:
                        return behavior(_following(sent, stream, decode), context)
            except Exception as error:  # noqa: BLE001  the edge of the RPC
                self._refuse(context, method, error)

        return call

    def _streaming(
        self, behavior: Behavior | None, method: str, decode: Decode, *, requests: bool
    ) -> Behavior:
        assert behavior is not None

        def call(sent: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                with self._place(method, context), self._watched(context, method) as stream:
                    following = _following(sent, stream, decode)
                    source = following if requests else _first(following, method)
                    for answer in behavior(source, context):
                        with stream.client_turn():
                            yield answer
                        stream.told()
            except Exception as error:  # noqa: BLE001  the edge of the RPC
                self._refuse(context, method, error)

        return call

    def _only(
        self, sent: Iterator[Any], context: grpc.ServicerContext, method: str, decode: Decode
    ) -> Any:
        with self._watched(context, method) as stream:
            return _first(_following(sent, stream, decode), method)

    @contextmanager
    def _place(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        """For as long as the call holds a thread, and until what it has said has left: a client
        that does not read lets it lie in this process's memory."""
        caller = caller_of(context.peer())
        if caller:
            self._connections.called(context.peer())
        give_back = self._quotas.take(caller, self._calls if caller else self._local_calls)
        try:
            kind = self._kind(method)
            with self._quotas.one(caller, kind) if kind else nullcontext():
                yield
        finally:
            leaving = self._watchdog.leaving(context, method)

            def left() -> None:
                self._watchdog.forget(leaving)
                give_back()

            if not context.add_callback(left):
                left()

    def _kind(self, method: str) -> Quota | None:
        return self._slow if method.startswith(_REFLECTION) else self._kinds.get(method)

    @contextmanager
    def _watched(self, context: grpc.ServicerContext, method: str) -> Iterator[Watched]:
        if method in (_OUR_WATCH, _HEALTH_WATCH):
            deadline = Deadline.of(context, LONGEST_WATCH_S, default_s=LONGEST_WATCH_S)
        else:
            longest_s = LONGEST_CHECK_S if method == _CHECK else LONGEST_STREAM_S
            deadline = Deadline.of(context, longest_s)
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


def _first(requests: Iterator[Any], method: str) -> Any:
    request = next(requests, None)
    if request is None:
        raise UsageError(f"{method} takes one message, and none came", code="no_message")
    return request


def _following(requests: Iterator[Any], stream: Watched, decode: Decode) -> Iterator[Any]:
    """What the client says, message by message. Raises UsageError for what is none."""
    while True:
        with stream.client_turn():
            request = next(requests, None)
        if request is None:
            return
        stream.heard(len(request))
        try:
            request = decode(request)
        except DecodeError as error:
            raise UsageError(
                f"{len(request)} bytes are no message of {stream.method}", code="bad_message"
            ) from error
        yield request
