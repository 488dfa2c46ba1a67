"""A client that does its worst, of each kind there is, and a good one, each in a process of its own
that `bench neighbours` and tests start:

    python -m kvwarehouse_bench.strain.neighbours

It reads lines. The first is what a Given has, as JSON: not an argument, which everybody can read.
With the next it begins, and says so once it is at its worst; with the one after that it gives back
what it holds and says what it did; and so on. What a kind does is a generator: it takes what it
holds, then each `yield` is a round, with the seconds to rest before the next.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

import kvwarehouse as kvw
from kvwarehouse import wire
from kvwarehouse_bench.harness.eventually import DEADLINE_S
from kvwarehouse_bench.harness.pages import check_pages, pages_of
from kvwarehouse_bench.strain import raw_protocols
from kvwarehouse_bench.strain.raw_protocols import LIVE, Grant, RawSession, SlotsFile

PROMPT: Final = 8
_REST_S: Final = 0.02
_HELD_S: Final = 0.5
_AT_ONCE: Final = 16
_CALLS: Final = 40
"""More than the daemon has threads for one host."""
_TRICKLING: Final = 8
_CONNECTIONS: Final = 4
_EVICTED: Final = 100_000


@dataclass
class Given:
    """What the process was told, and what it has done."""

    kind: str
    address: str
    """Of the local socket."""
    listen: str
    token: str
    slots: str
    """The file."""
    space: kvw.Namespace
    seed: int
    rounds: int = 0
    calls_s: list[float] = field(default_factory=list)
    opened: kvw.OpenNamespace | None = None
    """Of a good one, from its first turn on."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.next = self.rng.getrandbits(31)

    @property
    def socket(self) -> str:
        return self.address.removeprefix("unix://")

    def connect(self) -> kvw.Client:
        return kvw.connect(self.address, timeout_s=DEADLINE_S)

    @contextmanager
    def session(self) -> Iterator[RawSession]:
        with self.connect() as client, RawSession(self.socket) as session:
            client.open(self.space)
            yield session

    def new_nodes(self) -> list[int]:
        """Stored by nobody; a few bytes of a token each."""
        self.next += PROMPT
        return list(range(self.next - PROMPT, self.next))

    def keys(self, count: int) -> list[bytes]:
        return [self.rng.randbytes(16) for _ in range(count)]

    def timed(self, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        try:
            return call()
        finally:
            self.calls_s.append(time.perf_counter() - begin)


Rests = Iterator[float]


# --- good ones


def _moves_pages(given: Given) -> Rests:
    if given.opened is None:
        given.opened = given.connect().open(given.space)
    return _moved(given, given.opened)


def _moves_pages_over_grpc(given: Given) -> Rests:
    if given.opened is None:
        client = kvw.connect(given.listen, token=given.token, timeout_s=DEADLINE_S)
        given.opened = client.open(given.space)
    return _moved(given, given.opened)


def _moved(given: Given, ns: kvw.OpenNamespace) -> Rests:
    """A round counts when all of it was stored and is there."""
    out = np.zeros((PROMPT, given.space.page_bytes), np.uint8)
    while True:
        nodes = given.new_nodes()
        pages = pages_of(nodes, 0, 0, given.space.page_bytes)
        with contextlib.suppress(kvw.CapacityError, kvw.TransportError):
            stored = given.timed(lambda: ns.store(nodes, pages, timeout_s=DEADLINE_S)).stored  # noqa: B023
            loaded = given.timed(lambda: ns.load(nodes, out, timeout_s=DEADLINE_S))  # noqa: B023
            check_pages(out[:loaded], nodes[:loaded], 0, 0)
            given.rounds += int(stored == loaded == PROMPT)
        yield 0.0


# --- those that do their worst


def _only_computes(given: Given) -> Rests:
    """What the machine adds by itself: a processor is busy, and memory."""
    noise = np.frombuffer(given.rng.randbytes(4 << 20), np.uint64)
    while True:
        np.bitwise_xor.reduce(noise)
        yield 0.0


def _never_seals(given: Given) -> Rests:
    with given.session() as session, _taken(given, session) as take:
        while True:
            take()
            yield _REST_S


@contextmanager
def _taken(given: Given, session: RawSession) -> Iterator[Callable[[], None]]:
    """Calls take all that there is; it is given back at the end."""
    held: list[Grant] = []

    def take() -> None:
        while granted := session.reserve(given.space.id, given.keys(_AT_ONCE)):
            held.extend(granted)

    try:
        yield take
    finally:
        for begin in range(0, len(held), _AT_ONCE):
            session.settle(held[begin : begin + _AT_ONCE])


def _sends_all(given: Given) -> Rests:
    """Reservations, seals of nothing, settlements and reports of whatever is there."""
    slots = SlotsFile(Path(given.slots))
    with given.session() as session:
        while True:
            granted = session.reserve(given.space.id, given.keys(2 * _AT_ONCE))
            half = len(granted) // 2
            session.seal(given.space.id, granted[:half])
            session.settle(granted[half:])
            live = slots.slots(LIVE)
            for slot in given.rng.choices(live, k=16 if live else 0):
                session.report(Grant(slots.key(slot), slots.generation(slot), slot))
            yield 0.0


def _pins_all(given: Given) -> Rests:
    with ExitStack() as held:
        sessions = [held.enter_context(given.connect()) for _ in range(2)]
        for ns in (session.open(given.space) for session in sessions):
            while True:
                nodes = given.new_nodes()
                ns.store(nodes, pages_of(nodes, 0, 0, given.space.page_bytes), timeout_s=DEADLINE_S)
                try:
                    held.callback(ns.pin(nodes).release)
                except kvw.PinError:
                    break
        while True:
            with contextlib.suppress(kvw.PinError):
                held.callback(ns.pin(nodes).release)
            yield 0.0


def _touches(given: Given) -> Rests:
    tiny = kvw.Namespace(**{**given.space.to_fields(), "page_bytes": 512})
    with given.connect() as client:
        ns, nodes = client.open(tiny), list(range(256))
        out = np.zeros((len(nodes), tiny.page_bytes), np.uint8)
        while True:
            ns.store(nodes, out, timeout_s=DEADLINE_S)
            for _ in range(20):
                ns.load(nodes, out, timeout_s=DEADLINE_S)
                ns.lookup(nodes)
            yield 0.0


def _opens_namespaces(given: Given) -> Rests:
    fields = given.space.to_fields()
    with given.connect() as client:
        for number in itertools.count():
            client.open(kvw.Namespace(**{**fields, "adapter": f"{given.seed}:{number}"}))
            yield 0.0


def _evicts_and_clears(given: Given) -> Rests:
    with given.connect() as client:
        ns = client.open(given.space)
        while True:
            for _ in range(2):
                nodes = given.new_nodes()
                ns.store(nodes, pages_of(nodes, 0, 0, given.space.page_bytes), timeout_s=DEADLINE_S)
            client.evict(given.space, _EVICTED, "all")
            client.clear(given.space)
            yield 0.0


def _says_no_body(given: Given) -> Rests:
    methods = [f"/{wire.SERVICE_NAME}/{name}" for name in ("Lookup", "Status", "OpenNamespace")]
    with ExitStack() as stack:
        calls = [stack.enter_context(_Calls(given)) for _ in range(_CONNECTIONS)]
        while True:
            for each in calls:
                each.renew([(given.rng.choice(methods), b"") for _ in range(_CALLS)])
            yield _HELD_S


def _trickles(given: Given) -> Rests:
    """Stores of a page that is a byte each round."""
    with given.connect() as client:
        client.open(given.space)
    header = wire.warehouse_pb2.StoreHeader(
        namespace_id=given.space.id,
        prefix=wire.prefix_to_wire(np.arange(given.space.page_tokens, dtype=np.uint32), None),
        pages=1,
    )
    first = wire.warehouse_pb2.StoreRequest(header=header).SerializeToString()
    byte = wire.warehouse_pb2.StoreRequest(data=b"b").SerializeToString()
    with _Calls(given) as calls:
        while True:
            calls.renew([(f"/{wire.SERVICE_NAME}/Store", first)] * _TRICKLING)
            for _ in range(50):
                calls.say(byte)
                yield _REST_S


class _Calls:
    """Calls of one connection, from a host of its own, that are not ended."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._socket: socket.socket | None = None
        self._streams: list[int] = []
        self._last = -1

    def __enter__(self) -> _Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def renew(self, calls: list[tuple[str, bytes]]) -> None:
        """Takes back those it has, and opens these; with what each says first."""
        said = b"".join(
            raw_protocols.frame(raw_protocols.RST_STREAM, 0, stream, (8).to_bytes(4, "big"))
            for stream in self._streams
        )
        self._streams = []
        if self._socket is None:
            host, _, port = self._given.listen.rpartition(":")
            self._socket = socket.create_connection(
                (host, int(port)), DEADLINE_S, source_address=("127.0.0.2", 0)
            )
            self._socket.settimeout(1.0)
            said, self._last = (
                raw_protocols.PREFACE + raw_protocols.frame(raw_protocols.SETTINGS, 0, 0),
                -1,
            )
        for method, first in calls:
            self._last += 2
            self._streams.append(self._last)
            said += raw_protocols.call_head(self._last, method, self._given.token)
            if first:
                said += raw_protocols.call_data(self._last, first, ends=False)
        self._send(said)

    def say(self, message: bytes) -> None:
        """A message more, in each of them."""
        self._send(
            b"".join(raw_protocols.call_data(each, message, ends=False) for each in self._streams)
        )

    def _send(self, said: bytes) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(said)
            while select.select([self._socket], [], [], 0)[0]:
                if not self._socket.recv(1 << 16):
                    raise ConnectionResetError
        except OSError:
            self._close()  # hung up on: the next round connects again

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._streams = None, []


def _stands_still(given: Given) -> Rests:
    """Whoever started it stops it (SIGSTOP) once it goes: with its share of reservations and
    pins."""
    with given.session() as session, _taken(given, session) as take:
        pinning = _pins_all(given)
        with contextlib.closing(pinning):  # type: ignore[type-var]
            next(pinning)
            take()
            while True:
                yield 0.0
                next(pinning)


WORK: Final[dict[str, Callable[[Given], Rests]]] = {
    "moves pages": _moves_pages,
    "moves pages over gRPC": _moves_pages_over_grpc,
    "only computes": _only_computes,
    "never seals what it was granted": _never_seals,
    "pins all that it may": _pins_all,
    "sends all it can": _sends_all,
    "touches all the time": _touches,
    "opens namespaces all the time": _opens_namespaces,
    "evicts and clears all the time": _evicts_and_clears,
    "opens calls and says nothing": _says_no_body,
    "lets stores trickle": _trickles,
    "is stopped with its share": _stands_still,
}


def main() -> None:
    told = json.loads(sys.stdin.readline())
    given = Given(**{**told, "space": kvw.Namespace(**told["space"])})
    while sys.stdin.readline():
        with contextlib.closing(WORK[given.kind](given)) as work:  # type: ignore[type-var]
            next(work)
            given.rounds, given.calls_s = 0, []
            _say("going")
            while True:
                rest_s = next(work)
                if select.select([sys.stdin], [], [], rest_s)[0]:
                    break
            if not sys.stdin.readline():
                break
        calls_s = given.calls_s
        whole = len(calls_s) > 1
        p99_s = statistics.quantiles(calls_s, n=100, method="inclusive")[98] if whole else 0.0
        _say({"rounds": given.rounds, "calls_s": sum(calls_s), "p99_s": p99_s})
    os._exit(0)  # whatever it holds: who told it nothing more is gone


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
