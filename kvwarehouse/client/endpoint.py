"""Where a daemon is, how it is trusted, and what every call to it needs to know: its deadline, and
what a failure means.

An address is "unix:///path/kvw.sock" or a bare path on this host, "host:port" elsewhere. A client
on the daemon's host trusts a daemon of this process's own user, of root, and of the user that
$KVW_DAEMON_UID names. The native client asks the kernel who is at the other end of the local
socket. gRPC lets nobody ask that, so its socket must lie where no stranger could have put it, and
before a connection to loopback without TLS the kernel is asked who listens there.

Thread-safe; does no I/O but reading a PEM file, the owners of a local socket, and who listens
(a call, and a connection where it shows nobody).
"""

from __future__ import annotations

import errno
import math
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

import grpc

from kvwarehouse import trusted_path
from kvwarehouse.addresses import joined_address, loopback_ips
from kvwarehouse.client.listeners import listeners_of
from kvwarehouse.errors import TransportError, UsageError, WarehouseError
from kvwarehouse.wire import CHANNEL_OPTIONS, error_from_rpc

GRPC_SUFFIX = ".grpc"
"""The gRPC service listens beside the local socket, at its path with this suffix."""

# sockaddr_un has 108 bytes with the closing zero; the longer of the two sockets must fit.
MAX_PATH_BYTES = 107 - len(GRPC_SUFFIX)

_HOST_PORT = re.compile(
    r"(?:\[(?P<v6>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:/\[\]@]+)):(?P<port>\d{1,5})"
)

# Reasons of those who find somebody there.
_LOCAL_ADVICE = (("Permission denied", "the socket is another user's: run as the daemon's user"),)
_REMOTE_ADVICE = (
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not trusted: give tls (--tls) the PEM file of who signed it",
    ),
    ("WRONG_VERSION_NUMBER", "who listens there does not speak TLS: leave tls (--tls) out"),
    ("Socket closed", "who listens there may want TLS: give tls (--tls)"),
)


@dataclass(frozen=True)
class Address:
    """One of `path` (local) and `host` with `port` (remote) is set."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def local(self) -> bool:
        return bool(self.path)

    @property
    def grpc_target(self) -> str:
        """The name that gRPC resolves."""
        if self.local:
            return f"unix:{self.path}{GRPC_SUFFIX}"
        return joined_address(self.host, self.port)

    @property
    def loopback(self) -> tuple[str, ...]:
        """The IP addresses that it means if all of them are loopback's; else none."""
        return loopback_ips(self.host)

    def unreachable(self, reason: str) -> str:
        """What to say where nobody could be asked, with the system's or gRPC's reason."""
        for words, advice in _LOCAL_ADVICE if self.local else _REMOTE_ADVICE:
            if words in reason:
                return f"cannot connect to {self} ({reason}); {advice}"
        at, host = f"--socket {self.path}", ""
        if not self.local:
            at, host = f"--listen {self.grpc_target} --token-file FILE", " on that host"
            if not self.loopback:
                at += " --tls-cert FILE --tls-key FILE"
        return f"no daemon at {self} ({reason}); start one with `kvwarehouse serve {at}`{host}"

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.local else self.grpc_target


def parse_address(text: str) -> Address:
    """Raises UsageError (code "bad_address") that shows what addresses look like."""
    if not isinstance(text, str):
        raise _bad_address(text, f"is of type {type(text).__name__}")
    if text.startswith(("unix:", "/")):
        return Address(path=_checked_path(text))
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise _bad_address(text, "is no address")
    if not 1 <= int(match["port"]) <= 65535:
        raise _bad_address(text, "has a port out of 1 to 65535")
    return Address(host=match["v6"] or match["host"], port=int(match["port"]))


def _checked_path(text: str) -> str:
    path = text.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path.startswith("/") or path.startswith("//") or "\x00" in path:
        raise _bad_address(text, "has no absolute path")
    size_bytes = len(path.encode("utf-8", "surrogateescape"))
    if size_bytes > MAX_PATH_BYTES:
        raise _bad_address(
            text,
            f"has a path of {size_bytes} bytes; sockets allow {MAX_PATH_BYTES}, use a shorter one",
        )
    return path


def _bad_address(text: object, problem: str) -> UsageError:
    return UsageError(
        f"address {text!r} {problem}; write unix:///run/kvwarehouse/kvw.sock, or host:port",
        code="bad_address",
        context={"address": text},
    )


DAEMON_UID_VARIABLE: Final = "KVW_DAEMON_UID"


def daemon_uid(environ: Mapping[str, str] | None = None) -> int | None:
    """Whose daemon is trusted beside ours and root's. UsageError where the variable is no uid."""
    text = (os.environ if environ is None else environ).get(DAEMON_UID_VARIABLE, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 32):
        raise UsageError(
            f"{DAEMON_UID_VARIABLE} is {text!r}; set it to a user's number", code="bad_setting"
        )
    return int(text)


def check_socket(path: str) -> None:
    """Raises TransportError (code "daemon_untrusted") where a stranger could have put the socket
    there, or could put another. Where nothing is there nothing is said."""
    try:
        weak = trusted_path.weak_point(path, _trusted(), group=True)
    except OSError as error:
        raise _untrusted(path, f"cannot be looked at ({error.strerror})") from error
    if weak is not None:
        raise _untrusted(weak.path, weak.why, weak.owner)


def check_owner(path: str) -> None:
    """As check_socket, of the socket alone: before each call, because gRPC connects again by itself
    where a daemon has ended, and in /tmp a stranger can have taken its place. One look."""
    try:
        owner = os.stat(path).st_uid
    except OSError:
        return
    if owner not in _trusted():
        raise _untrusted(path, f"belongs to uid {owner}", owner)


def check_listeners(address: Address) -> None:
    """Raises TransportError (code "daemon_untrusted") where a stranger would get a connection to
    this address of loopback, and (code "unavailable") where nobody gets it: a stranger may wait for
    just that, and come before gRPC does. Where somebody does who is not seen nothing is said: he is
    in another network namespace."""
    found = listeners_of(address.loopback, address.port)
    if not found:
        if all(_refuses(host, address.port) for host in address.loopback):
            raise _unavailable(address, "nobody listens there")
        found = listeners_of(address.loopback, address.port)  # he may have come meanwhile
    for each in found:
        # All users outside of this user namespace have one number: to name it names nobody.
        if each.uid == trusted_path.outside() or each.uid not in _trusted():
            at = Address(host=str(each.at), port=address.port)
            advice = ", or use TLS"
            if address.host == "localhost":
                advice += "; if not, write the daemon's own IP address in place of localhost"
            raise _untrusted(
                str(address), f"is uid {each.uid}'s, who listens on {at}", each.uid, advice
            )


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError as error:
        return error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)
    return False


def _unavailable(address: Address, reason: str) -> TransportError:
    return TransportError(
        address.unreachable(reason), code="unavailable", context={"address": address}
    )


def _trusted() -> set[int | None]:
    return {os.geteuid(), 0, daemon_uid()}


def _untrusted(path: str, why: str, owner: int | None = None, advice: str = "") -> TransportError:
    fix = ""
    if owner not in (None, trusted_path.outside()):  # not that of all users outside of a namespace
        fix = f"; if it is the right one, set {DAEMON_UID_VARIABLE}={owner}"
    who = daemon_uid()
    who = os.geteuid() if who is None else who
    return TransportError(
        f"{path} {why}, and only a daemon of uid {who} or root is trusted with KV{fix}{advice}",
        code="daemon_untrusted",
        retryable=False,
        context={"path": path},
    )


OPTIONS = (
    *CHANNEL_OPTIONS,
    # Own connections: a new channel really connects anew instead of waiting with an old one.
    ("grpc.use_local_subchannel_pool", 1),
    # A daemon that vanished without a word is noticed within 30 s, also by a watch, which says
    # nothing and has a day. Daemons take a ping every 10 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own pings are in the way of those, and wait a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # A daemon is a host of the same network: nobody's KV goes to what http_proxy names.
    ("grpc.enable_http_proxy", 0),
)

_PROBE_S = 0.2
"""Of a connection on this host, which takes as many microseconds."""

_JUDGED_FOR_S = 1.0
"""How long a connection to loopback is taken for what it was."""

_ANSWER_SHARE = 0.1
_ANSWER_MOST_S = 0.5


def server_wait_s(timeout_s: float) -> float:
    """Of a call's time, how long the daemon may wait: the rest is for its answer to come back
    before the call is cut."""
    return timeout_s - min(timeout_s * _ANSWER_SHARE, _ANSWER_MOST_S)


def checked_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """Seconds, 0 or more. Infinity is refused: every wait has an end. UsageError "bad_timeout"."""
    try:
        seconds = float(timeout_s)
    except (TypeError, ValueError):
        seconds = float("nan")
    if not 0 <= seconds <= MAX_TIMEOUT_S:
        raise UsageError(
            f"{name} = {timeout_s!r} is not a number of seconds from 0 to {MAX_TIMEOUT_S:.0f}",
            code="bad_timeout",
        )
    return seconds


MAX_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Credentials:
    """How a remote daemon is trusted and convinced. Nothing is needed for a local one."""

    token: str | None = None
    tls: bool | str | os.PathLike[str] | None = None
    """True: the authorities that the system trusts; a path: a PEM file with the one to trust."""

    def check(self, address: Address) -> None:
        """Raises UsageError (code "bad_credentials") where a secret or KV would cross a network
        unprotected, or where they cannot be used. Who listens on loopback is asked later, before
        each connection."""
        if self.token is not None and not (
            isinstance(self.token, str) and self.token.isascii() and self.token.isprintable()
        ):
            raise _bad_credentials("token is not one line of ASCII text; pass the token itself")
        if address.local and self.tls:
            raise _bad_credentials(
                f"tls is of no use at {address}: its socket is on this host; leave it out"
            )
        if not address.local and not address.loopback and not self.tls:
            raise _bad_credentials(
                f"{address} is another host and tls is not set: KV would travel in the clear; pass"
                " tls=True, or tls=PATH of the authority's PEM file"
            )


class CallOptions(TypedDict):
    """The deadline and the credentials of a call, as gRPC takes them."""

    timeout: float
    metadata: tuple[tuple[str, str], ...]


class Endpoint:
    def __init__(self, address: Address, credentials: Credentials, timeout_s: float) -> None:
        credentials.check(address)
        self.address = address
        self.timeout_s = timeout_s
        self._credentials = credentials
        self._asks_who_listens = bool(address.loopback) and not credentials.tls
        self._judged_at_s = -math.inf
        self.pid = os.getpid()
        """Of the process that may use it."""

    def budget(self, timeout_s: float | None) -> CallOptions:
        token = self._credentials.token
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        return {
            "timeout": self.timeout_s if timeout_s is None else timeout_s,
            "metadata": metadata,
        }

    def target(self) -> str:
        """What gRPC connects to. Raises TransportError (code "daemon_untrusted") where a local
        socket, or a folder on the way to it, is a stranger's, or where one listens on loopback."""
        if not self.address.local:
            self._judge_connection(False)
            return self.address.grpc_target
        check_socket(self._socket)
        return f"unix:{self._socket}"

    def refuse_stranger(self, *, connected: bool) -> None:
        """As target(), before a call over a channel that there is: it may have lost its daemon.
        `connected`: whether the call goes over a connection that there is, too."""
        if self.address.local:
            check_owner(self._socket)
        elif not connected or time.monotonic() > self._judged_at_s + _JUDGED_FOR_S:
            self._judge_connection(connected)

    def _judge_connection(self, connected: bool) -> None:
        """Before it is made, and again once it is there, seldom: gRPC connects anew by itself, and
        somebody else may have come between our look and that."""
        if self._asks_who_listens:
            check_listeners(self.address)
        self._judged_at_s = time.monotonic() if connected else -math.inf

    @property
    def _socket(self) -> str:
        return self.address.path + GRPC_SUFFIX

    def tls(self) -> grpc.ChannelCredentials | None:
        """None: in the clear."""
        tls = self._credentials.tls
        if not tls:
            return None
        return grpc.ssl_channel_credentials(None if tls is True else _pem(tls))

    @property
    def forked(self) -> bool:
        """Whether this is a child, forked off the process that may use it. Asked before any lock is
        taken: a thread of the parent's may have held it, and nobody gives it back in the child."""
        return os.getpid() != self.pid

    def refuse_forked(self) -> None:
        if self.forked:
            raise forked()

    def explained(self, error: grpc.RpcError) -> WarehouseError:
        """The error of our tree for one of gRPC's; code "unavailable" where no daemon answered:
        then, and only then, the call is worth repeating over a new connection."""
        failure = error_from_rpc(error, address=str(self.address))
        if failure.code != "unavailable":
            return failure
        reason = getattr(error, "details", lambda: None)() or "no answer"
        return _unavailable(self.address, reason)


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
        raise _bad_credentials(f"tls {path!r} is no PEM file that can be read: {error}") from error


def _bad_credentials(message: str) -> UsageError:
    return UsageError(message, code="bad_credentials")
