"""Admission of calls and connections: how many there may be, how many of them one host over TCP may
hold, and what is said of those that were refused.

Thread-safe; `look` of each is called by one thread. A caller is the host that a call comes from,
not its token: engines share tokens. Callers of the Unix socket are all of this daemon's user, and
have no share: what they hold is bounded for all. Refused calls are counted by reason, and told in
the log at a rate that those who ask cannot raise. The connections of the TCP address are looked at
beside gRPC, which neither tells their number nor knows of shares.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Final, TypeAlias
from urllib.parse import unquote

from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.metrics import METRICS
from kvwarehouse.daemon.repeats import SeldomTold
from kvwarehouse.errors import CapacityError

CONNECTIONS_MAX: Final = 256
"""What is beyond it is closed unheard. They come before any token, so who opens them faster than a
look comes round keeps others out: the warning is what tells."""

_NEAR: Final = 0.8
_RELAXED: Final = 0.5


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
class Quota:
    """`bound` of `what`; `code`: of the error at the bound; `advice`: what an operator can do."""

    bound: int
    what: str
    code: str
    advice: str = ""

    @property
    def share(self) -> int:
        """Of one host."""
        return (self.bound + 1) // 2


class Quotas:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], int] = {}  # by what and caller, "": all; what is not 0

    def take(self, caller: str, quota: Quota) -> Callable[[], None]:
        """One of the quota; what is returned gives it back, and is called once. Raises
        CapacityError, retryable, where all are taken, or `caller` has its share."""
        held, everybody, own = self._held, (quota.what, ""), (quota.what, caller)
        with self._lock:
            of_all, of_caller = held.get(everybody, 0), held.get(own, 0)
            if of_all >= quota.bound:
                raise _refusal(quota, of_all)
            if caller and of_caller >= quota.share:
                raise _refusal(quota, of_caller, caller)
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
    def one(self, caller: str, quota: Quota) -> Iterator[None]:
        """take(), for as long as the context lasts."""
        give_back = self.take(caller, quota)
        try:
            yield
        finally:
            give_back()


def _refusal(quota: Quota, held: int, caller: str = "") -> CapacityError:
    of, bound = "", "the bound of this daemon"
    if caller:
        of, bound = f" of {caller}", "half of what this daemon takes of all hosts"
    advice = f", or {quota.advice}" if quota.advice else ""
    return CapacityError(
        f"{held} {quota.what}{of} are under way, {bound}; try again when one has ended{advice}",
        code=quota.code,
    )


class Refusals:
    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds."""
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        reasons = METRICS["kvwarehouse_refused_calls_total"].values
        self._counts = dict.fromkeys(reasons, 0)
        self._peers = dict.fromkeys(reasons, "")
        self._told: SeldomTold[str] = SeldomTold()

    @property
    def counts(self) -> dict[str, int]:
        """Since the start, by reason."""
        with self._lock:
            return dict(self._counts)

    def count(self, reason: str, peer: str) -> None:
        """`peer`: as gRPC calls who asked. A reason outside the closed set is "other"."""
        reason = reason if reason in self._counts else "other"
        with self._lock:
            self._counts[reason] += 1
            self._peers[reason] = peer
            self._told.count(reason)

    def look(self) -> None:
        """Tells what came since it was told last."""
        with self._lock:
            due = [(each, self._peers[each[0]]) for each in self._told.due(self._clock())]
        for (reason, count), peer in due:
            self._log.event(Event.CALLS_REFUSED, reason=reason, count=count, last_from=peer)


class Connections:
    """Those taken at the TCP address by this process. gRPC closes whoever comes beyond `bound`,
    whoever has come before; what sees to it that no host has more than half for long, nor all that
    have shown no token, is a look: it ends those without one, the oldest first, and then the
    newest of the host. One user of this host can call from every address of loopback."""

    def __init__(self, log: Log, refusals: Refusals) -> None:
        self._log = log
        self._refusals = refusals
        self._near = False
        self._lock = threading.Lock()
        self._called: dict[str, _Peer] = {}  # have shown a token; by what gRPC calls them
        self._seen: list[_Peer] = []  # in the order in which they came
        self.port = 0  # until it listens
        self.count = 0
        self.bound = CONNECTIONS_MAX

    @property
    def crowded(self) -> bool:
        """Whether a host may have come to its share: then the next look is due soon."""
        return self.count >= self.bound // 2

    def called(self, peer: str) -> None:
        """A call of the connection of this peer, as gRPC calls it, had a token."""
        if peer not in self._called:
            with self._lock:
                self._called[peer] = _peer_of_call(peer)

    def look(self) -> None:
        """Counts them, ends those beyond a share, and says once when they came near the bound. A
        call to the kernel for each descriptor of this process: a millisecond for a
        thousand."""
        if not self.port:
            return
        with self._lock:
            called = dict(self._called)
        there = _taken_at(self.port)  # all that have called are among them, or gone
        self.count = came = len(there)
        with self._lock:
            for name, peer in called.items():
                if peer not in there:
                    del self._called[name]
        self._seen = [peer for peer in self._seen if peer in there]
        self._seen += there.keys() - set(self._seen)
        for peer in self._beyond_shares(set(called.values())):
            self.count -= _end(there[peer], self.port, peer)
            self._refusals.count("too_many_connections", f"{peer[0]}:{peer[1]}")
        share = came / self.bound
        if share >= _NEAR and not self._near:
            self._log.event(Event.CONNECTIONS_NEAR_BOUND, count=came, bound=self.bound)
        self._near = share >= (_RELAXED if self._near else _NEAR)

    def _beyond_shares(self, known: Container[_Peer]) -> list[_Peer]:
        half = (self.bound + 1) // 2
        of_hosts: dict[str, list[_Peer]] = {}
        for peer in self._seen:
            of_hosts.setdefault(host_of(peer[0]), []).append(peer)
        beyond: list[_Peer] = []
        for peers in of_hosts.values():
            strangers = [peer for peer in peers if peer not in known]
            others = [peer for peer in reversed(peers) if peer in known]
            beyond += (strangers + others)[: max(0, len(peers) - half)]
        ending = set(beyond)
        strangers = [peer for peer in self._seen if peer not in known and peer not in ending]
        return beyond + strangers[: max(0, len(strangers) - half)]


_Peer: TypeAlias = tuple[str, int]
"""Address and port."""


def _peer_of_call(peer: str) -> _Peer:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port)


def _plain(address: str) -> str:
    """As gRPC and the kernel would both write it."""
    there = ip_address(address.partition("%")[0])
    return str(getattr(there, "ipv4_mapped", None) or there)


def _taken_at(port: int) -> dict[_Peer, int]:
    """Descriptors of connections that this process has at its port."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        if peer := _peer_at(port, int(name)):
            found[peer] = int(name)
    return found


def _peer_at(port: int, fd: int) -> _Peer | None:
    # Another thread may close it, and open another, at any time: that is seen at the next look.
    try:
        peek = socket.socket(fileno=fd)
    except OSError:
        return None  # no socket, or gone
    try:
        here, there = peek.getsockname(), peek.getpeername()
        ours = isinstance(here, tuple) and here[1] == port
        return (_plain(there[0]), there[1]) if ours else None
    except OSError:
        return None  # a listener, or gone
    finally:
        peek.detach()


def _end(fd: int, port: int, peer: _Peer) -> bool:
    """Whether it did. gRPC closes the descriptor when it hears of the end."""
    try:
        held = os.dup(fd)  # so that it stays what it is while it is looked at
    except OSError:
        return False
    try:
        if _peer_at(port, held) != peer:
            return False
        there = socket.socket(fileno=held)
        try:
            there.shutdown(socket.SHUT_RDWR)
        finally:
            there.detach()
    except OSError:
        return False
    finally:
        os.close(held)
    return True
