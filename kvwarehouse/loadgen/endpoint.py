"""Where an engine listens, and connections to it that end at their deadlines.

An HttpEndpoint is immutable. A Cutoff ends connections whatever the other side does: a stream that
drips a byte now and then outlives every timeout of a single read. It has one thread of its own,
which ends with close(). Thread-safe.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.loadgen.completion_events import FailedError

_CONNECT_S = 10.0
_PATH = "/v1/completions"


class Line:
    """A connection under way. `cut` says why it was ended: "", "deadline" or "interrupted"."""

    def __init__(self, connection: socket.socket, end_s: float) -> None:
        self.connection = connection
        self.end_s = end_s
        self.cut = ""


class Cutoff:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._lines: set[Line] = set()
        self._over = False
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="kvw-cutoff", daemon=True)
        self._thread.start()

    @contextmanager
    def line(self, connection: socket.socket, end_s: float) -> Iterator[Line]:
        """Within it the connection is ended at `end_s` of the clock, or by hang_up()."""
        line = Line(connection, end_s)
        with self._changed:
            self._lines.add(line)
            if self._over:
                self._end(line, "interrupted")
            self._changed.notify()
        try:
            yield line
        finally:
            with self._changed:
                self._lines.discard(line)

    def hang_up(self) -> None:
        """Ends all connections, and those that are still to come."""
        with self._changed:
            self._over = True
            for line in self._lines:
                self._end(line, "interrupted")

    @property
    def over(self) -> bool:
        return self._over

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                now_s = self._clock()
                for line in self._lines:
                    if line.end_s <= now_s:
                        self._end(line, "deadline")
                waiting = [line.end_s for line in self._lines if not line.cut]
                self._changed.wait(max(0.001, min(waiting) - now_s) if waiting else None)

    @staticmethod
    def _end(line: Line, why: str) -> None:
        """With the lock held, so that the connection is not closed, and its number not another's,
        meanwhile."""
        if line.cut:
            return
        line.cut = why
        # Of the plain socket, also beneath TLS, whose own shutdown is not for other threads. An
        # error: the other side has ended it already.
        with suppress(OSError):
            socket.socket.shutdown(line.connection, socket.SHUT_RDWR)


@dataclass(frozen=True)
class HttpEndpoint:
    host: str
    port: int
    tls: ssl.SSLContext | None
    path: str
    headers: Mapping[str, str]

    def connected(self, timeout_s: float) -> http.client.HTTPConnection:
        """Its single reads and writes wait at most `timeout_s`. Raises FailedError."""
        if timeout_s <= 0:
            raise FailedError("deadline", "before a connection was made")
        bound_s = min(timeout_s, _CONNECT_S)
        connection = (
            http.client.HTTPConnection(self.host, self.port, timeout=bound_s)
            if self.tls is None
            else http.client.HTTPSConnection(
                self.host, self.port, timeout=bound_s, context=self.tls
            )
        )
        try:
            connection.connect()
        except TimeoutError as error:
            raise FailedError("connect_timeout", f"{self.host}:{self.port}") from error
        except OSError as error:
            raise FailedError("not_connected", f"{self.host}:{self.port}: {error}") from error
        connection.sock.settimeout(timeout_s)
        return connection

    def check(self) -> None:
        """Raises TransportError where nobody listens."""
        try:
            self.connected(_CONNECT_S).close()
        except FailedError as failed:
            raise TransportError(
                f"no engine at {self.host}:{self.port} ({failed.detail}); start it, or correct"
                " --engine",
                code="no_engine",
            ) from failed


def endpoint_of(url: str, key: str | None = None) -> HttpEndpoint:
    """Of "http://host:port", "https://host" or either with the path of its API, such as /v1.
    Raises UsageError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _bad(url, str(error)) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _bad(url, "it has no http:// and no host")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise _bad(url, "it must have a host, a port and a path only (--api-key-file has keys)")
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        path = path.removesuffix("/v1")
    path = path if path.endswith(_PATH) else path + _PATH
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    default_port = 443 if tls else 80
    return HttpEndpoint(parts.hostname, port or default_port, tls, path, headers)


def _bad(url: str, why: str) -> UsageError:
    return UsageError(
        f"--engine {url!r} is no engine: {why}; write http://host:port, or unix:///path for a"
        " daemon",
        code="bad_engine",
    )
