"""One channel of grpc.aio to a daemon: the twin of kvwarehouse/client/rpc.py.

Used in one event loop. Cancelling a task that awaits a call cancels the call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from kvwarehouse.aio.life import Life
from kvwarehouse.client.endpoint import OPTIONS, Address, CallOptions, Credentials, Endpoint
from kvwarehouse.client.rpc import Call
from kvwarehouse.errors import TransportError
from kvwarehouse.wire import WarehouseStub, error_from_rpc

_A = TypeVar("_A")
_T = TypeVar("_T")
_END = object()


class AsyncChannel:
    """Lazy: nothing is opened before the first call."""

    def __init__(
        self, address: Address, credentials: Credentials, timeout_s: float, life: Life
    ) -> None:
        self.endpoint = Endpoint(address, credentials, timeout_s)
        self._life = life
        self._channel: grpc.aio.Channel | None = None
        # What is under way, on it or on one that was lost: older grpcio does not find all of them
        # when a channel closes.
        self._calls: dict[Any, grpc.aio.Channel] = {}

    @property
    def address(self) -> Address:
        return self.endpoint.address

    @property
    def timeout_s(self) -> float:
        return self.endpoint.timeout_s

    async def close(self) -> None:
        """Ends what is under way with TransportError (code "cancelled")."""
        channels = set(self._calls.values())
        if self._channel is not None:
            channels.add(self._channel)
        self._channel = None
        for call in list(self._calls):
            call.cancel()
        for channel in channels:
            await channel.close()

    async def ask(self, call: Call[_A, _T]) -> _T:
        """One call with one answer."""

        async def invoke(channel: grpc.aio.Channel, budget: CallOptions) -> Any:
            if not callable(call.request):
                under_way = self._begin(channel, call.method, call.request, **budget)
                with self._awaiting(under_way):
                    return await under_way
            under_way = self._begin(channel, call.method, **budget)
            with self._awaiting(under_way):
                return await sent(under_way, call.request())

        return call.decode(await self._attempt(invoke, call.timeout_s))

    async def stream(self, call: Call[_A, _T]) -> AsyncGenerator[_T, None]:
        """The answers of a streaming call. Closing the generator cancels the call."""

        async def begin(channel: grpc.aio.Channel, budget: CallOptions) -> tuple[Any, Any, Any]:
            under_way = self._begin(channel, call.method, call.request, **budget)
            answers = aiter(under_way)
            try:
                with self._awaiting(under_way):  # whether anyone answers shows at the first answer
                    return under_way, answers, await anext(answers, _END)
            except BaseException:
                under_way.cancel()
                raise

        under_way, answers, answer = await self._attempt(begin, call.timeout_s)
        try:
            while answer is not _END:
                yield call.decode(answer)
                with self._awaiting(under_way):
                    answer = await anext(answers, _END)
        except grpc.RpcError as error:
            raise error_from_rpc(error, address=str(self.address)) from error
        finally:
            under_way.cancel()
            await answers.aclose()

    async def _attempt(
        self,
        invoke: Callable[[grpc.aio.Channel, CallOptions], Awaitable[_T]],
        timeout_s: float | None,
    ) -> _T:
        """As that of the blocking channel: once more over a new connection if nobody answered,
        within what is left of its time."""
        budget = self.endpoint.budget(timeout_s)
        end = time.monotonic() + budget["timeout"]
        try:
            return await self._invoke(invoke, budget)
        except TransportError as failure:
            left_s = end - time.monotonic()
            if failure.code != "unavailable" or left_s <= 0:
                raise
        return await self._invoke(invoke, self.endpoint.budget(left_s))

    async def _invoke(
        self, invoke: Callable[[grpc.aio.Channel, CallOptions], Awaitable[_T]], budget: CallOptions
    ) -> _T:
        channel = self._current()
        try:
            return await invoke(channel, budget)
        except grpc.RpcError as error:
            failure = self.endpoint.explained(error)
            if failure.code == "unavailable":
                self._forget(channel)
            raise failure from error

    def _begin(self, channel: grpc.aio.Channel, method: str, *request: Any, **budget: Any) -> Any:
        stub = WarehouseStub(channel)  # type: ignore[no-untyped-call]
        call = getattr(stub, method)(*request, **budget)
        self._calls[call] = channel
        call.add_done_callback(lambda done: self._calls.pop(call, None))
        return call

    @contextmanager
    def _awaiting(self, call: Any) -> Iterator[None]:
        """grpc.aio raises CancelledError both where this task was cancelled and where somebody
        cancelled the call; the second is an error like others."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling() or not call.cancelled():
                raise
            raise TransportError(
                f"the call to {self.address} was cut: the client was closed",
                code="cancelled",
                context={"address": self.address},
            ) from None

    def _current(self) -> grpc.aio.Channel:
        self._life.check()
        if self._channel is None:
            self._channel = self._connect()
        else:
            state = self._channel.get_state()
            self.endpoint.refuse_stranger(connected=state is grpc.ChannelConnectivity.READY)
        return self._channel

    def _forget(self, channel: grpc.aio.Channel) -> None:
        """Not closed: other calls are under way on it, and hear of its end themselves. It ends when
        the last of them lets go of it."""
        if self._channel is channel:
            self._channel = None

    def _connect(self) -> grpc.aio.Channel:
        target, tls = self.endpoint.target(), self.endpoint.tls()
        if tls is None:
            return grpc.aio.insecure_channel(target, options=OPTIONS)
        return grpc.aio.secure_channel(target, tls, options=OPTIONS)


async def sent(call: Any, requests: Iterator[Any]) -> Any:
    """The answer to a stream of requests, each made when the one before has been taken. When this
    ends, nothing reads the caller's pages any more.

    Written by a task beside the one that awaits the answer: a write to a daemon that does not
    answer waits on, whatever the call's deadline says (grpcio 1.76 to 1.82)."""
    writing = asyncio.create_task(_write(call, requests))
    try:
        return await call
    finally:
        writing.cancel()
        await asyncio.wait((writing,))
        if not writing.cancelled():
            writing.result()


async def _write(call: Any, requests: Iterator[Any]) -> None:
    try:
        for request in requests:
            await call.write(request)
        await call.done_writing()
    except (asyncio.InvalidStateError, grpc.RpcError, grpc.aio.InternalError):
        pass  # it has ended: the answer, or its status, says how
    except BaseException:
        call.cancel()
        raise
