"""What every channel to a daemon needs to know, whatever waits for its answers: where it is, how it
is trusted, deadlines, and what a failure means.

Thread-safe; does no I/O but reading a PEM file and the owners of a local socket.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvwarehouse.client import trust
from kvwarehouse.client.address import GRPC_SUFFIX, Address
from kvwarehouse.errors import TransportError, UsageError, WarehouseError
from kvwarehouse.wire import CHANNEL_OPTIONS, error_from_rpc

# Own connections, so that a new channel really connects anew instead of waiting with an old one.
OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))

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


class Dial:
    def __init__(self, address: Address, credentials: Credentials, timeout_s: float) -> None:
        credentials.check(address)
        self.address = address
        self.timeout_s = timeout_s
        self._credentials = credentials
        self.pid = os.getpid()
        """Of the process that may use it."""

    def budget(self, timeout_s: float | None) -> dict[str, Any]:
        """The deadline and the credentials of a call, as gRPC takes them."""
        token = self._credentials.token
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        return {
            "timeout": self.timeout_s if timeout_s is None else timeout_s,
            "metadata": metadata,
        }

    def target(self) -> str:
        """What gRPC connects to. Raises TransportError (code "daemon_untrusted") where a local
        socket, or a folder on the way to it, is a stranger's."""
        if not self.address.local:
            return self.address.grpc_target
        trust.check_socket(self._socket)
        return f"unix:{self._socket}"

    def refuse_stranger(self) -> None:
        """As target(), before a call over a channel that there is: it may have lost its daemon."""
        if self.address.local:
            trust.check_owner(self._socket)

    @property
    def _socket(self) -> str:
        return self.address.path + GRPC_SUFFIX

    def tls(self) -> grpc.ChannelCredentials | None:
        """None: in the clear."""
        tls = self._credentials.tls
        if not tls:
            return None
        return grpc.ssl_channel_credentials(None if tls is True else _pem(tls))

    def refuse_forked(self) -> None:
        if os.getpid() != self.pid:
            raise forked()

    def explained(self, error: grpc.RpcError) -> WarehouseError:
        """The error of our tree for one of gRPC's; code "unavailable" where no daemon answered:
        then, and only then, the call is worth repeating over a new connection."""
        failure = error_from_rpc(error, address=str(self.address))
        if failure.code != "unavailable":
            return failure
        reason = getattr(error, "details", lambda: None)() or "no answer"
        return TransportError(
            self.address.unreachable(reason),
            code="unavailable",
            context={"address": self.address},
        )


def forked() -> TransportError:
    return TransportError(
        "this client was connected before a fork; connect again in the child",
        code="forked",
        retryable=False,
    )


def closed() -> UsageError:
    return UsageError("the client is closed; connect again", code="closed")


def _pem(path: bool | str | os.PathLike[str]) -> bytes:
    try:
        return Path(os.fspath(path)).read_bytes()  # type: ignore[arg-type]
    except (OSError, TypeError) as error:
        raise _bad(f"tls {path!r} is no PEM file that can be read: {error}") from error


def _bad(message: str) -> UsageError:
    return UsageError(message, code="bad_credentials")
