"""Where a daemon is: "unix:///path/kvw.sock" or a bare path on this host, "host:port" elsewhere.

Stateless; thread-safe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvwarehouse.errors import UsageError

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
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def unreachable(self, reason: str) -> str:
        """What to say where nobody could be asked, with the system's or gRPC's reason."""
        for words, advice in _LOCAL_ADVICE if self.local else _REMOTE_ADVICE:
            if words in reason:
                return f"cannot connect to {self} ({reason}); {advice}"
        at, host = f"--socket {self.path}", ""
        if not self.local:
            at, host = f"--listen {self.grpc_target} --token-file FILE", " on that host"
        return f"no daemon at {self} ({reason}); start one with `kvwarehouse serve {at}`{host}"

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.local else self.grpc_target


def parse_address(text: str) -> Address:
    """Raises UsageError (code "bad_address") that shows what addresses look like."""
    if not isinstance(text, str):
        raise _bad(text, f"is of type {type(text).__name__}")
    if text.startswith(("unix:", "/")):
        return Address(path=_checked_path(text))
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise _bad(text, "is no address")
    if not 1 <= int(match["port"]) <= 65535:
        raise _bad(text, "has a port out of 1 to 65535")
    return Address(host=match["v6"] or match["host"], port=int(match["port"]))


def _checked_path(text: str) -> str:
    path = text.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path.startswith("/") or path.startswith("//") or "\x00" in path:
        raise _bad(text, "has no absolute path")
    size_bytes = len(path.encode("utf-8", "surrogateescape"))
    if size_bytes > MAX_PATH_BYTES:
        raise _bad(
            text,
            f"has a path of {size_bytes} bytes; sockets allow {MAX_PATH_BYTES}, use a shorter one",
        )
    return path


def _bad(text: object, problem: str) -> UsageError:
    return UsageError(
        f"address {text!r} {problem}; write unix:///run/kvwarehouse/kvw.sock, or host:port",
        code="bad_address",
        context={"address": text},
    )
