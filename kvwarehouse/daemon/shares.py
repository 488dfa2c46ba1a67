"""How many calls of a kind there may be, and how many of them one host over TCP may hold.
Thread-safe.

A caller is the host that a call comes from, not its token: engines share tokens. Callers of the
Unix socket are all of this daemon's user, and have no share: what they hold is bounded for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

from kvwarehouse.errors import CapacityError


def caller_of(peer: str) -> str:
    """The host in what gRPC calls a peer, "" for the Unix socket. Of IPv6 the network of 64 bits:
    a host has all of its addresses."""
    kind, _, address = unquote(peer).partition(":")
    if not kind.startswith("ipv"):
        return ""
    return host_of(address.rpartition(":")[0].strip("[]"))


def host_of(address: str) -> str:
    """The caller at an address of IPv4 or IPv6."""
    host = address.partition("%")[0]
    try:
        there = ip_address(host)
    except ValueError:
        return host
    if not isinstance(there, IPv6Address):
        return str(there)
    return str(there.ipv4_mapped or IPv6Address(int(there) >> 64 << 64))


@dataclass(frozen=True)
class Places:
    """`bound` of `what`; `code`: of the error at the bound; `advice`: what an operator can do."""

    bound: int
    what: str
    code: str
    advice: str = ""

    @property
    def share(self) -> int:
        """Of one host."""
        return (self.bound + 1) // 2


class Shares:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], int] = {}  # by what and caller, "": all; what is not 0

    def take(self, caller: str, places: Places) -> Callable[[], None]:
        """One of the places; what is returned gives it back, and is called once. Raises
        CapacityError, retryable, where all are taken, or `caller` has its share."""
        held, everybody, own = self._held, (places.what, ""), (places.what, caller)
        with self._lock:
            of_all, of_caller = held.get(everybody, 0), held.get(own, 0)
            if of_all >= places.bound:
                raise _refusal(places, of_all)
            if caller and of_caller >= places.share:
                raise _refusal(places, of_caller, caller)
            held[everybody] = of_all + 1
            if caller:
                held[own] = of_caller + 1

        def give_back() -> None:
            with self._lock:
                for key in {everybody, own}:
                    held[key] -= 1
                    if not held[key]:
                        del held[key]

        return give_back

    @contextmanager
    def one(self, caller: str, places: Places) -> Iterator[None]:
        """take(), for as long as the context lasts."""
        give_back = self.take(caller, places)
        try:
            yield
        finally:
            give_back()


def _refusal(places: Places, held: int, caller: str = "") -> CapacityError:
    of, bound = "", "the bound of this daemon"
    if caller:
        of, bound = f" of {caller}", "half of what this daemon takes of all hosts"
    advice = f", or {places.advice}" if places.advice else ""
    return CapacityError(
        f"{held} {places.what}{of} are under way, {bound}; try again when one has ended{advice}",
        code=places.code,
    )
