"""Admission of calls and connections: how many there may be, how many of them one host over TCP may
hold, and what is said of those that were refused.

Thread-safe; `look` of each is called by one thread. A caller is the host that a call comes from,
not its token: engines share tokens. Callers of the Unix socket are all of this daemon's user, and
have no share: what they hold is bounded for all. Refused calls are counted by reason, and told in
the log at a rate that those who ask cannot raise. The connections of the TCP address are counted
because gRPC itself does not tell their number.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Final
from urllib.parse import unquote

from kvwarehouse.daemon.logs import Event, Log
from kvwarehouse.daemon.metrics import METRICS
from kvwarehouse.errors import CapacityError

TOLD_EVERY_S: Final = 10.0
"""Between two lines of one reason, at least."""

CONNECTIONS_MAX: Final = 256
"""What is beyond it is closed unheard. They come before any token, so anybody can fill them: the
warning is what tells."""

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
        self._told: dict[str, tuple[float, int]] = {}  # when last, and of how many

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

    def look(self) -> None:
        """Tells what came since it was told last."""
        now = self._clock()
        for reason, count in self.counts.items():
            told_at, told = self._told.get(reason, (now - TOLD_EVERY_S, 0))
            if count > told and now - told_at >= TOLD_EVERY_S:
                self._told[reason] = (now, count)
                self._log.event(
                    Event.CALLS_REFUSED,
                    reason=reason,
                    count=count - told,
                    last_from=self._peers[reason],
                )


class Connections:
    """Those taken at `port` by this process."""

    def __init__(self, port: int, log: Log) -> None:
        self._port = port
        self._log = log
        self._near = False
        self.count = 0
        self.bound = CONNECTIONS_MAX

    def look(self) -> None:
        """Counts them, and says once when they come near the bound. A call to the kernel for each
        descriptor of this process: a millisecond for a thousand."""
        self.count = sum(_is_taken_at(self._port, int(fd)) for fd in os.listdir("/proc/self/fd"))
        share = self.count / self.bound
        if share >= _NEAR and not self._near:
            self._log.event(Event.CONNECTIONS_NEAR_BOUND, count=self.count, bound=self.bound)
        self._near = share >= (_RELAXED if self._near else _NEAR)


def _is_taken_at(port: int, fd: int) -> bool:
    # Another thread may close it, and open another, at any time: that is counted a second later.
    try:
        peek = socket.socket(fileno=fd)
    except OSError:
        return False  # no socket, or gone
    try:
        here, _there = peek.getsockname(), peek.getpeername()
        return isinstance(here, tuple) and here[1] == port
    except OSError:
        return False  # a listener, or gone
    finally:
        peek.detach()
