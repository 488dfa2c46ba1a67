"""The gRPC servers: one on the Unix socket beside the local one, one on TCP when asked. The same
services on both; the second also asks for tokens. Started and stopped by one thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import grpc
from grpc_health.v1 import (  # type: ignore[import-untyped, unused-ignore]
    health,
    health_pb2_grpc,
)
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped, unused-ignore]

from kvwarehouse import wire
from kvwarehouse.addresses import joined_address, loopback_ips, split_address
from kvwarehouse.config import Config
from kvwarehouse.daemon import admission
from kvwarehouse.daemon.credentials import TcpCredentials
from kvwarehouse.daemon.health import Health
from kvwarehouse.daemon.interceptors import threads_of
from kvwarehouse.errors import TransportError

STOP_GRACE_S: Final = 2.0
"""How long calls under way may go on when the daemon ends."""

HANDSHAKE_S: Final = 5.0
"""From a connection to the end of its TLS and HTTP/2 greetings; no token was shown until then."""

WAITING: Final = 256
"""Calls that wait for a thread, four connections full of them. What such a call has said is not
read yet: it is bounded by its stream's window."""

WINDOW_BYTES: Final = 1 << 20
"""What a call may say before anybody reads it."""

IDLE_S: Final = 60.0
"""How long a connection without a call keeps its place. Clients connect anew by themselves."""

METADATA_BYTES: Final = 16 << 10
"""Of one call; a token has a few hundred."""


def _options() -> Sequence[tuple[str, int | str]]:
    return (
        *wire.CHANNEL_OPTIONS,
        # Two daemons on one port would share its calls between two warehouses.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", 64),
        ("grpc.max_allowed_incoming_connections", admission.CONNECTIONS_MAX),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
        ("grpc.max_metadata_size", METADATA_BYTES),
        # gRPC would make the window of every call as large as it finds the connection fast: 32 MiB
        # and more on loopback.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # A peer that vanished without a word is noticed within 80 s.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    )


class Servers:
    """What the daemon serves over gRPC. `listen_address`: TCP, with the port in use."""

    def __init__(
        self,
        config: Config,
        interceptor: grpc.ServerInterceptor,
        credentials: TcpCredentials | None = None,
    ) -> None:
        """Binds, so that errors show here, and that who calls from now on waits for start().
        Raises TransportError when an address is taken. `credentials`: for TCP, which there is only
        with them."""
        self._config = config
        self._interceptor = interceptor
        self._servers: list[grpc.Server] = []
        self._unix: grpc.Server | None = None  # of them
        self._served: tuple[wire.WarehouseServicer, Health] | None = None
        self._socket = ""  # once it is ours
        self._socket_file: tuple[int, int] | None = None
        self.listen_address = ""
        try:
            self._bind_socket(config.grpc_socket)
            if credentials is not None:
                self._bind_tcp(config.listen, credentials)
        except BaseException:
            self.stop()
            raise

    def start(self, service: wire.WarehouseServicer, health_service: Health) -> None:
        self._served = (service, health_service)
        for server in self._servers:
            self._serve(server)

    def bind_again(self) -> None:
        """Serves the Unix socket anew, where somebody removed its file. Calls under way on it are
        ended within STOP_GRACE_S, for which this waits. Raises as the constructor does."""
        if self._unix is not None:
            self._servers.remove(self._unix)
            ended, self._unix = self._unix.stop(STOP_GRACE_S), None
            ended.wait(STOP_GRACE_S * 2)  # then it removes no socket of its name any more
        self._bind_socket(self._config.grpc_socket)
        assert self._unix is not None
        self._serve(self._unix)

    def _serve(self, server: grpc.Server) -> None:
        assert self._served is not None
        service, health_service = self._served
        wire.add_WarehouseServicer_to_server(  # type: ignore[no-untyped-call, unused-ignore]
            service, server
        )
        health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
        names = (wire.SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        server.start()

    def stop(self) -> None:
        """Refuses new calls at once, ends those under way within STOP_GRACE_S. More than once is
        once."""
        for ended in [server.stop(STOP_GRACE_S) for server in self._servers]:
            ended.wait(STOP_GRACE_S * 2)
        self._servers.clear()
        if self._socket:
            if file_at(self._socket) == self._socket_file:
                with contextlib.suppress(OSError):  # its folder may be another's by now
                    os.unlink(self._socket)
            self._socket = ""

    def _bind_socket(self, path: str) -> None:
        clear_stale(path)
        server = self._server([self._interceptor])
        _bound(path, lambda: server.add_insecure_port(f"unix:{path}"))
        self._servers.append(server)
        self._unix = server
        self._socket = path
        self._socket_file = file_at(path)
        os.chmod(path, 0o600)

    def _bind_tcp(self, address: str, credentials: TcpCredentials) -> None:
        # The first sees a call first: nothing of ours runs for a call without a token.
        server = self._server([credentials.tokens, self._interceptor])
        port = split_address(address)[1]
        for ip in _addresses(address):
            at = joined_address(ip, port)
            if (tls := credentials.tls()) is not None:
                port = _bound(at, partial(server.add_secure_port, at, tls))
            else:
                port = _bound(at, partial(server.add_insecure_port, at))
        self._servers.append(server)
        self.listen_address = f"{address.rpartition(':')[0]}:{port}"

    def _server(self, interceptors: Sequence[grpc.ServerInterceptor]) -> grpc.Server:
        threads = threads_of(self._config.streams)
        server = grpc.server(
            ThreadPoolExecutor(threads, thread_name_prefix="grpc"),
            interceptors=list(interceptors),
            options=_options(),
            # What finds no thread waits: those of a host that has its half already are refused as
            # soon as one looks at them. Beyond the bound gRPC refuses whoever comes.
            maximum_concurrent_rpcs=threads + WAITING,
        )
        return server


def clear_stale(path: str) -> None:
    """Removes the socket that a dead daemon left at `path`. Raises TransportError when someone
    answers there, or when something that is no socket of ours is in the way."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(facts.st_mode) or facts.st_uid != os.geteuid():
        raise TransportError(
            f"{path} is not a socket of uid {os.geteuid()}; move it away, or name another --socket",
            code="socket_foreign",
            retryable=False,
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError:
            pass  # a full backlog, another kind of socket: someone is there
    raise TransportError(
        f"{path} is in use by a running daemon; stop it, or name another --socket",
        code="socket_in_use",
        retryable=False,
    )


_ALL: Final = ("0.0.0.0", "::")


def _addresses(address: str) -> list[str]:
    """What gRPC is to bind for host:port: all IP addresses of the name that are this host's. It
    would be content with one of them, and another user who has the port at another would get the
    clients that try that first. Raises TransportError where one is taken, or there is none."""
    host, port = split_address(address)
    here: list[str] = []
    for name in _ALL if host in _ALL else loopback_ips(host) or (host,):
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise _not_bound(address, str(error)) from error
        here += [_ip(where) for family, _, _, _, where in found if _is_free(family, where)]
    if not here:
        raise _not_bound(address, os.strerror(errno.EADDRNOTAVAIL))
    return here[:1] if host in _ALL else list(dict.fromkeys(here))  # one of _ALL is both to gRPC


def _is_free(family: int, where: tuple[Any, ...]) -> bool:
    """False where the address is not this host's, as of IPv6 where there is none. Raises
    TransportError where somebody has the port."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            probe.bind(where)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise _not_bound(joined_address(_ip(where), where[1]), str(error)) from error
    return True


def _ip(where: tuple[Any, ...]) -> str:
    zone = where[3] if len(where) > 3 else 0
    return f"{where[0]}%{zone}" if zone else str(where[0])


def _bound(address: str, bind: Callable[[], int]) -> int:
    try:
        port = bind()
    except RuntimeError as error:
        raise _not_bound(address, str(error)) from error
    if port == 0:
        raise _not_bound(address, "refused")
    return port


def file_at(path: str) -> tuple[int, int] | None:
    """Which file has the name, by its numbers; None where there is none, or it cannot be seen."""
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def is_gone(path: str, file: tuple[int, int] | None) -> bool:
    """Returns True when somebody removed or replaced what file_at() found, if it found any. A disk
    that fails to answer does not say that."""
    if file is None:
        return False
    try:
        facts = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return (facts.st_dev, facts.st_ino) != file


def _not_bound(address: str, reason: str) -> TransportError:
    return TransportError(
        f"cannot listen on {address}: {reason}; is the address this host's, and is the port free?",
        code="address_unavailable",
        retryable=False,
        context={"address": address},
    )
