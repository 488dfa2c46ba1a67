"""One exchange on the local socket, seals of a step and reservations of the next, against a bare
round trip of as many bytes between two processes. Copies and digests, which a store adds, are in
`bench store`."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np

from kvwarehouse import core
from kvwarehouse.client import Client, OpenNamespace
from kvwarehouse.client.endpoint import parse_address
from kvwarehouse_bench.harness.alternation import Rounds, alternate, p50, timed
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.filled import full_settings, is_full
from kvwarehouse_bench.micro.options import PAGE_TOKENS, Bench, open_bench, prompt
from kvwarehouse_bench.micro.private import private_daemon
from kvwarehouse_bench.micro.socket_session import (
    MESSAGE_BYTES,
    NONE_GRANTED,
    SocketSession,
    exchange_bytes,
    exchange_message,
    granted_by,
    reservations,
)

PAGES = 512
_PAGE_BYTES = 4096
# A host that others use goes at half its speed for seconds: all short rounds may fall into them.
_CALLS = 100
_GOAL = "under 1,000 us"

# Answers each message with so many bytes, until its peer is gone.
_ECHO = """
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
reply = bytes(int(sys.argv[2]))
while peer.recv(int(sys.argv[3])):
    peer.send(reply)
"""


def measure(bench: Bench) -> list[Figure]:
    with _bare() as bare:
        emptied = _compared(bench.options.rounds, bench.client, bare, full=False)
        with private_daemon(full_settings()) as (_, client):
            full = _compared(bench.options.rounds, client, bare, full=True)
    what = f"exchange, {PAGES} pages sealed and {PAGES} reserved"
    return [_figure(f"{what}, p50", emptied), _figure(f"{what}, each evicting one, p50", full)]


def _compared(rounds: int, client: Client, bare: Callable[[], float], *, full: bool) -> Rounds:
    """`full`: a warehouse in which every reservation takes the place of another page."""
    ns = open_bench(client, _PAGE_BYTES)
    secret = np.random.default_rng(3).bytes(core.SECRET_BYTES)
    seeds = count(1)

    def steps() -> float:
        if not full:
            client.clear(ns.space)
        return statistics.median(_steps(session, ns, secret, next(seeds)))

    with SocketSession(parse_address(client.address).path) as session:
        while full and not is_full(client):
            steps()
        found = alternate(rounds, steps, bare)
    client.clear(ns.space)
    return found


def _figure(name: str, rounds: Rounds) -> Figure:
    return Figure(
        name=name,
        value=rounds.ours_s * 1e6,
        unit="us",
        limit=rounds.limit_s * 1e6,
        limit_name="bare round trip of as many bytes, p50",
        goal=_GOAL,
    )


def _steps(session: SocketSession, ns: OpenNamespace, secret: bytes, seed: int) -> list[float]:
    """Seconds of each exchange that seals what the one before it was granted."""
    taken: list[float] = []
    granted = NONE_GRANTED
    for step in range(_CALLS + 1):
        tokens = prompt(PAGES, seed=seed << 8 | step)
        keys = core.chain_keys(secret, ns.space.id, tokens, PAGE_TOKENS)
        request = exchange_message(ns.space.id, granted, reservations(keys, tokens))
        reply = b""

        def ask(request: bytes = request) -> None:
            nonlocal reply
            reply = session.ask(request)

        seconds = timed(ask)
        if granted:
            taken.append(seconds)
        granted = granted_by(reply, len(granted))
    session.give_back(granted)
    return taken


@contextmanager
def _bare() -> Iterator[Callable[[], float]]:
    """The p50 of as many round trips with a process that only answers."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request_bytes, reply_bytes = exchange_bytes(PAGES)
    numbers = [str(each) for each in (theirs.fileno(), reply_bytes, MESSAGE_BYTES)]
    request = bytes(request_bytes)
    with (
        mine,
        subprocess.Popen(
            [sys.executable, "-c", _ECHO, *numbers], pass_fds=[theirs.fileno()]
        ) as echo,
    ):
        theirs.close()
        mine.settimeout(20.0)
        try:

            def round_trip() -> None:
                mine.send(request)
                mine.recv(MESSAGE_BYTES)

            yield lambda: p50(round_trip, _CALLS)
        finally:
            mine.close()
            echo.wait(20.0)
