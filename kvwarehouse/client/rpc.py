"""A call of the service as a value, which any channel takes, and the blocking client's channel: one
gRPC channel to a daemon, with deadlines on every call, errors of our tree, and a reconnect that
does not wait out gRPC's backoff. kvwarehouse/aio/rpc.py is its twin.

Thread-safe. A channel does not survive a fork: in a child, calls raise TransportError.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from kvwarehouse.client.endpoint import OPTIONS, Address, CallOptions, Credentials, Endpoint, closed
from kvwarehouse.errors import TransportError
from kvwarehouse.wire import WarehouseStub, error_from_rpc

_A = TypeVar("_A")
_T = TypeVar("_T")
_A_co = TypeVar("_A_co", covariant=True)


@dataclass(frozen=True)
class Call(Generic[_A, _T]):
    """What is sent, and what its answer means. Immutable."""

    method: str
    request: Message | Callable[[], Iterator[Message]]
    """Or what makes the requests of a call that streams them."""
    decode: Callable[[_A], _T]
    """Of the answer; where answers are streamed, of each."""
    timeout_s: float | None = None
    """None: the channel's."""


class _Answers(Protocol[_A_co]):
    """Of a call that streams them, as gRPC gives them."""

    def __iter__(self) -> Iterator[_A_co]: ...

    def cancel(self) -> bool: ...


class Channel:
    """Lazy: nothing is opened before the first call."""

    def __init__(self, address: Address, credentials: Credentials, timeout_s: float) -> None:
        self.endpoint = Endpoint(address, credentials, timeout_s)
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._closed = False

    @property
    def address(self) -> Address:
        return self.endpoint.address

    @property
    def timeout_s(self) -> float:
        return self.endpoint.timeout_s

    def close(self) -> None:
        """Nothing in a forked child."""
        if self.endpoint.forked:
            return
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def ask(self, call: Call[_A, _T]) -> _T:
        """One call with one answer."""

        def invoke(stub: WarehouseStub, budget: CallOptions) -> _A:
            request = call.request() if callable(call.request) else call.request
            answer: _A = getattr(stub, call.method)(request, **budget)
            return answer

        return call.decode(self._attempt(invoke, call.timeout_s))

    def stream(self, call: Call[_A, _T]) -> Generator[_T, None, None]:
        """The answers of a streaming call. Closing the generator cancels the call."""

        def begin(stub: WarehouseStub, budget: CallOptions) -> tuple[_Answers[_A], list[_A]]:
            answers: _Answers[_A] = getattr(stub, call.method)(call.request, **budget)
            return answers, list(islice(answers, 1))  # whether anyone answers shows at the first

        answers, first = self._attempt(begin, call.timeout_s)
        try:
            yield from map(call.decode, first)
            yield from map(call.decode, answers)
        except grpc.RpcError as error:
            raise error_from_rpc(error, address=str(self.address)) from error
        finally:
            answers.cancel()

    def _attempt(
        self, invoke: Callable[[WarehouseStub, CallOptions], _T], timeout_s: float | None
    ) -> _T:
        """Runs `invoke`, once more over a new connection if no daemon answered: after a restart the
        old one only knows that it is gone. Every call of the service may be repeated, within what
        is left of its time."""
        budget = self.endpoint.budget(timeout_s)
        end = time.monotonic() + budget["timeout"]
        try:
            return self._invoke(invoke, budget)
        except TransportError as failure:
            left_s = end - time.monotonic()
            if failure.code != "unavailable" or left_s <= 0:
                raise
        return self._invoke(invoke, self.endpoint.budget(left_s))

    def _invoke(
        self, invoke: Callable[[WarehouseStub, CallOptions], _T], budget: CallOptions
    ) -> _T:
        stub, channel = self._current()
        try:
            return invoke(stub, budget)
        except grpc.RpcError as error:
            failure = self.endpoint.explained(error)
            if failure.code == "unavailable":
                self._forget(channel)
            raise failure from error
        except ValueError:  # what gRPC raises for a channel that was closed before the call began
            if not self._closed:
                raise
            raise closed() from None

    def _current(self) -> tuple[WarehouseStub, grpc.Channel]:
        self.endpoint.refuse_forked()
        with self._lock:
            if self._closed:
                raise closed()
            if self._channel is None:
                self._channel = self._connect()
            else:
                self.endpoint.refuse_stranger(connected=_is_connected(self._channel))
            stub = WarehouseStub(self._channel)  # type: ignore[no-untyped-call]
            return stub, self._channel

    def _forget(self, channel: grpc.Channel) -> None:
        """Not closed: other threads may be about to call on it, or hear of its end themselves. It
        ends when the last of them lets go of it."""
        with self._lock:
            if self._channel is channel:
                self._channel = None

    def _connect(self) -> grpc.Channel:
        target, tls = self.endpoint.target(), self.endpoint.tls()
        if tls is None:
            return grpc.insecure_channel(target, options=OPTIONS)
        return grpc.secure_channel(target, tls, options=OPTIONS)


def _is_connected(channel: grpc.Channel) -> bool:
    """grpcio's own subscribe() would tell it late, by a thread. False where another grpcio keeps
    its state elsewhere, which costs a look at who listens."""
    check = getattr(getattr(channel, "_channel", None), "check_connectivity_state", None)
    return check is not None and check(False) == grpc.ChannelConnectivity.READY.value[0]
