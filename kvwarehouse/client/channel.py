"""One gRPC channel to a daemon: deadlines on every call, errors of our tree, and a reconnect that
does not wait out gRPC's backoff.

Thread-safe. A channel does not survive a fork: in a child, calls raise TransportError.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import grpc

from kvwarehouse.client.address import Address
from kvwarehouse.errors import TransportError, UsageError, WarehouseError
from kvwarehouse.wire import CHANNEL_OPTIONS, WarehouseStub, error_from_rpc

_T = TypeVar("_T")
Answers = Generator[Any, None, None]

# Own connections, so that a new channel really connects anew instead of waiting with an old one.
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


_ANSWER_SHARE = 0.1
_ANSWER_MOST_S = 0.5


def server_wait_s(timeout_s: float) -> float:
    """Of a call's time, how long the daemon may wait: the rest is for its answer to come back
    before the call is cut."""
    return timeout_s - min(timeout_s * _ANSWER_SHARE, _ANSWER_MOST_S)


@dataclass(frozen=True)
class Credentials:
    """How a remote daemon is trusted and convinced. Nothing is needed for a local one."""

    token: str | None = None
    tls: bool | str | os.PathLike[str] | None = None
    """True: the authorities that the system trusts; a path: a PEM file with the one to trust."""

    def check(self, address: Address) -> None:
        """Raises UsageError (code "bad_credentials") where a secret or KV would travel unprotected,
        or where they cannot be used."""
        if self.token is not None and not (
            isinstance(self.token, str) and self.token.isascii() and self.token.isprintable()
        ):
            raise _bad("token is not one line of ASCII text; pass the token itself")
        if address.local and self.tls:
            raise _bad(f"tls is of no use at {address}: its socket is on this host; leave it out")
        if not address.local and not address.loopback and not self.tls:
            raise _bad(
                f"{address} is another host and tls is not set: KV would travel in the clear; pass"
                " tls=True, or tls=PATH of the authority's PEM file"
            )


class Channel:
    """Lazy: nothing is opened before the first call."""

    def __init__(self, address: Address, credentials: Credentials, timeout_s: float) -> None:
        credentials.check(address)
        self.address = address
        self.timeout_s = timeout_s
        self._credentials = credentials
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._closed = False
        self._pid = os.getpid()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
        if channel is not None and os.getpid() == self._pid:
            channel.close()

    def call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """One unary call. `request` may be a function that makes an iterator of requests."""
        return self.attempt(
            lambda stub, budget: self._invoke(stub, method, request, budget), timeout_s
        )

    def stream(self, method: str, request: Any, timeout_s: float | None = None) -> Answers:
        """The answers of a streaming call. Closing the generator cancels the call."""

        def begin(stub: WarehouseStub, budget: dict[str, Any]) -> tuple[Any, list[Any]]:
            call = getattr(stub, method)(request, **budget)
            return call, list(islice(call, 1))  # whether anyone answers shows at the first one

        call, first = self.attempt(begin, timeout_s)
        try:
            yield from first
            yield from call
        except grpc.RpcError as error:
            raise error_from_rpc(error, address=str(self.address)) from error
        finally:
            call.cancel()

    def attempt(
        self, invoke: Callable[[WarehouseStub, dict[str, Any]], _T], timeout_s: float | None
    ) -> _T:
        """Runs `invoke`, once more over a new connection if no daemon answered: after a restart the
        old one only knows that it is gone. Every call of the service may be repeated."""
        budget = self._budget(self.timeout_s if timeout_s is None else timeout_s)
        stub, channel = self._current()
        try:
            return invoke(stub, budget)
        except grpc.RpcError as error:
            failure = self._explained(error)
            if failure.code != "unavailable":
                raise failure from error
        self._drop(channel)
        stub, channel = self._current()
        try:
            return invoke(stub, budget)
        except grpc.RpcError as error:
            self._drop(channel)
            raise self._explained(error) from error

    @staticmethod
    def _invoke(stub: WarehouseStub, method: str, request: Any, budget: dict[str, Any]) -> Any:
        return getattr(stub, method)(request() if callable(request) else request, **budget)

    def _budget(self, timeout_s: float) -> dict[str, Any]:
        token = self._credentials.token
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        return {"timeout": timeout_s, "metadata": metadata}

    def _current(self) -> tuple[WarehouseStub, grpc.Channel]:
        if os.getpid() != self._pid:
            raise TransportError(
                "this client was connected before a fork; connect again in the child",
                code="forked",
                retryable=False,
            )
        with self._lock:
            if self._closed:
                raise UsageError("the client is closed; connect again", code="closed")
            if self._channel is None:
                self._channel = self._connect()
            stub = WarehouseStub(self._channel)  # type: ignore[no-untyped-call]
            return stub, self._channel

    def _drop(self, channel: grpc.Channel) -> None:
        with self._lock:
            if self._channel is not channel:
                return
            self._channel = None
        channel.close()

    def _connect(self) -> grpc.Channel:
        target, tls = self.address.grpc_target, self._credentials.tls
        if not tls:
            return grpc.insecure_channel(target, options=_OPTIONS)
        roots = None if tls is True else _pem(tls)
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(roots), options=_OPTIONS)

    def _explained(self, error: grpc.RpcError) -> WarehouseError:
        failure = error_from_rpc(error, address=str(self.address))
        if failure.code != "unavailable":
            return failure
        reason = getattr(error, "details", lambda: None)() or "no answer"
        return TransportError(
            f"no daemon at {self.address} ({reason}); {self.address.start_hint}",
            code="unavailable",
            context={"address": self.address},
        )


def _pem(path: bool | str | os.PathLike[str]) -> bytes:
    try:
        return Path(os.fspath(path)).read_bytes()  # type: ignore[arg-type]
    except (OSError, TypeError) as error:
        raise _bad(f"tls {path!r} is no PEM file that can be read: {error}") from error


def _bad(message: str) -> UsageError:
    return UsageError(message, code="bad_credentials")
