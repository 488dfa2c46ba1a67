"""Eight client processes at once, loading and storing, against as many that only copy; and what
lookups take in the crowd, beside a loop that only hashes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvwarehouse import core
from kvwarehouse.client import connect
from kvwarehouse.errors import WarehouseError
from kvwarehouse.types import Namespace
from kvwarehouse_bench.harness.alternation import Rounds, timed
from kvwarehouse_bench.micro.figures import GIGABYTE, Figure
from kvwarehouse_bench.micro.load import check_filled, copied
from kvwarehouse_bench.micro.options import PAGE_TOKENS, Bench, noise, prompt

CLIENTS = 8
_PROMPTS = 8
_STORED_PART = 0.3
_ANSWER_S = 120.0
_P95 = 94  # of 99 cuts


@dataclass
class Turn:
    """What one client did in its turn."""

    moved_bytes: int = 0
    seconds: float = 0.0
    lookups_s: list[float] = field(default_factory=list)
    hashes_s: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.moved_bytes / self.seconds


def measure(bench: Bench) -> list[Figure]:
    pages = max(1, bench.options.pages // _PROMPTS)
    ns = bench.open(bench.options.page_bytes)
    rows = noise(pages, bench.options.page_bytes)
    for number in range(_PROMPTS):
        ns.store(prompt(pages, seed=number), rows, timeout_s=60)
        check_filled(ns.lookup(prompt(pages, seed=number)).pages, pages)
    ours: list[list[Turn]] = []
    copies: list[list[Turn]] = []
    with _clients(bench, ns.space, pages) as clients:
        _together(clients, "load_and_store")  # to warm up
        alone = [_together(clients[:1], "load_and_store")[0].rate for _ in range(3)]
        for turn in range(bench.options.rounds):
            sides = [("load_and_store", ours), ("copy", copies)]
            for what, found in sides if turn % 2 == 0 else reversed(sides):
                found.append(_together(clients, what))
    bench.client.clear(ns.space)
    return [*_moved(ours, copies, statistics.median(alone)), _lookups(ours)]


def _moved(
    ours: Sequence[Sequence[Turn]], copies: Sequence[Sequence[Turn]], alone: float
) -> list[Figure]:
    rates = [sum(turn.rate for turn in turns) for turns in ours]
    limits = [sum(turn.rate for turn in turns) for turns in copies]
    together = statistics.median(rates) / GIGABYTE
    return [
        Figure(
            name=f"{CLIENTS} clients load and store, together",
            value=together,
            unit="GB/s",
            limit=statistics.median(limits) / GIGABYTE,
            limit_name=f"{CLIENTS} processes that only copy",
            ratio_of_rounds=Rounds(
                [1 / rate for rate in rates], [1 / rate for rate in limits]
            ).speed_ratio,
        ),
        Figure(
            name="the same, beside one client alone",
            value=together,
            unit="GB/s",
            limit=alone / GIGABYTE,
            limit_name="one client",
        ),
    ]


def _lookups(ours: Sequence[Sequence[Turn]]) -> Figure:
    def p95_us(name: str) -> float:
        each = [_p95([each for turn in turns for each in getattr(turn, name)]) for turns in ours]
        return statistics.median(each) * 1e6

    return Figure(
        name="lookup in the crowd, p95",
        value=p95_us("lookups_s"),
        unit="us",
        limit=p95_us("hashes_s"),
        limit_name="hashing the same tokens in the crowd, p95",
    )


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[_P95] if len(values) > 1 else values[0]


# --- the clients' processes -----------------------------------------------------------------------


@contextmanager
def _clients(bench: Bench, space: Namespace, pages: int) -> Iterator[list[Connection]]:
    context = get_context("spawn")
    pairs = [context.Pipe() for _ in range(CLIENTS)]
    given = (bench.client.address, space.to_fields(), pages, bench.options.sizes.turn_s)
    processes = [
        context.Process(target=_serve, args=(theirs, number, *given), daemon=True)
        for number, (_, theirs) in enumerate(pairs)
    ]
    try:
        for process in processes:
            process.start()
        yield [mine for mine, _ in pairs]
    finally:
        for mine, _ in pairs:
            mine.close()
        for process in processes:
            process.terminate()
            process.join()


def _together(clients: Sequence[Connection], what: str) -> list[Turn]:
    for client in clients:
        client.send(what)
    turns: list[Turn] = []
    for client in clients:
        if not client.poll(_ANSWER_S):
            raise WarehouseError(f"a client of the bench did not answer in {_ANSWER_S:.0f} s")
        turns.append(client.recv())
    return turns


def _serve(
    orders: Connection,
    number: int,
    address: str,
    fields: dict[str, Any],
    pages: int,
    turn_s: float,
) -> None:
    with connect(address) as client:
        worker = _Client(client.open(Namespace(**fields)), pages, number, turn_s)
        while True:
            try:
                what = orders.recv()
            except EOFError:
                return
            orders.send(getattr(worker, what)())


class _Client:
    def __init__(self, ns: Any, pages: int, number: int, turn_s: float) -> None:
        self._ns, self._pages, self._turn_s = ns, pages, turn_s
        self._random = random.Random(number)
        self._rows = noise(pages, ns.space.page_bytes)
        self._out = np.ones_like(self._rows)
        self._secret = self._random.randbytes(core.SECRET_BYTES)

    def load_and_store(self) -> Turn:
        turn, begin = Turn(), time.perf_counter()
        while time.perf_counter() - begin < self._turn_s:
            # The first is a lookup: on a busy machine a turn may end after one thing.
            if turn.lookups_s and self._random.random() < _STORED_PART:
                tokens = prompt(self._pages, seed=1000 + self._random.getrandbits(30))
                moved = self._ns.store(tokens, self._rows, timeout_s=60).stored
            else:
                tokens = prompt(self._pages, seed=self._random.randrange(_PROMPTS))
                turn.lookups_s.append(timed(partial(self._ns.lookup, tokens)))
                turn.hashes_s.append(timed(partial(self._hash, tokens)))
                moved = self._ns.load(tokens, self._out, timeout_s=60)
            turn.moved_bytes += int(moved) * self._ns.space.page_bytes
        turn.seconds = time.perf_counter() - begin
        return turn

    def copy(self) -> Turn:
        turn, begin = Turn(), time.perf_counter()
        while time.perf_counter() - begin < self._turn_s:
            copied(self._out, self._rows)
            turn.moved_bytes += self._rows.nbytes
        turn.seconds = time.perf_counter() - begin
        return turn

    def _hash(self, tokens: Any) -> None:
        core.chain_keys(self._secret, self._ns.space.id, tokens, PAGE_TOKENS)
