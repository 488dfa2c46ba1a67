"""Who calls over TCP, and how much of what is bounded one of them may hold. Thread-safe.

A caller is the host that a call comes from, not its token: engines share tokens. Callers of the
Unix socket are all of this daemon's user, and have no share: what they hold is bounded for all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

from kvwarehouse.errors import CapacityError


def caller_of(peer: str) -> str:
    """The host in what gRPC calls a peer, "" for the Unix socket. Of IPv6 the network of 64 bits:
    a host has all of its addresses."""
    kind, _, address = unquote(peer).partition(":")
    if not kind.startswith("ipv"):
        return ""
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        there = ip_address(host)
    except ValueError:
        return host
    if not isinstance(there, IPv6Address):
        return str(there)
    return str(there.ipv4_mapped or IPv6Address(int(there) >> 64 << 64))


class Shares:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], int] = {}  # what is not 0

    @contextmanager
    def one(self, caller: str, bound: int, code: str, what: str) -> Iterator[None]:
        """One of the `bound` places of `what`, for as long as the context lasts. Raises
        CapacityError with `code`, retryable, where `caller` has half of them."""
        if not caller:
            yield
            return
        most = (bound + 1) // 2
        key = (caller, what)
        with self._lock:
            held = self._held.get(key, 0)
            if held >= most:
                raise CapacityError(
                    f"{held} {what} of {caller} are under way, half of what this daemon takes of "
                    "all hosts; try again when one has ended",
                    code=code,
                )
            self._held[key] = held + 1
        try:
            yield
        finally:
            with self._lock:
                self._held[key] -= 1
                if not self._held[key]:
                    del self._held[key]
