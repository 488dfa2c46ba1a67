"""Where an engine listens, and connections to it. Immutable; thread-safe."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvwarehouse.errors import TransportError, UsageError
from kvwarehouse.loadgen.completion_events import FailedError

_CONNECT_S = 10.0
_PATH = "/v1/completions"


@dataclass(frozen=True)
class Endpoint:
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


def endpoint_of(url: str, key: str | None = None) -> Endpoint:
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
    return Endpoint(parts.hostname, port or default_port, tls, path, headers)


def _bad(url: str, why: str) -> UsageError:
    return UsageError(
        f"--engine {url!r} is no engine: {why}; write http://host:port, or unix:///path for a"
        " daemon",
        code="bad_engine",
    )
