"""The workloads, each of a peer and the warehouse in turns: every round has each way of both once,
and each begins now and then. Two turns before the first do not count; what is loaded in them is
compared byte by byte.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvwarehouse_bench.harness.alternation import rotated
from kvwarehouse_bench.peers.contenders import Contender, ContenderError

LOOKUP, LOAD, STORE, STORE_ONE = "lookup", "load", "store", "store one"
DURABLE, COLD = "durable store", "cold load"
LOOKUP_PAGE_BYTES = 4096
_WARM_TURNS = 2
_TWO_THREADS = "2 threads"
"""In a way's name: of such ones as many threads are compared."""


@dataclass(frozen=True)
class PeerPlan:
    page_sizes: Sequence[int]
    rounds: int
    keys: int
    calls: int
    """Lookups in a round."""


@dataclass
class PeerRounds:
    """Of one work with one size of pages, the peer beside the warehouse: by way a value a round.
    That is seconds, or those of each single call."""

    work: str
    page_bytes: int
    pages: int = 0
    peer: dict[str, list[Any]] = field(default_factory=dict)
    ours: dict[str, list[Any]] = field(default_factory=dict)
    reason: str = ""
    """Why there is nothing of the peer, or not all."""


_Ring = Sequence[tuple[Contender, str, dict[str, list[Any]]]]


class ContenderPair:
    """A peer and the warehouse, both started."""

    def __init__(
        self, peer: Contender, ours: Contender, plan: PeerPlan, tell: Callable[[str], None]
    ) -> None:
        self.peer, self.ours, self.plan = peer, ours, plan
        self._tell = tell

    def in_memory(self) -> list[PeerRounds]:
        found = [self._done(LOOKUP, LOOKUP_PAGE_BYTES, self._lookup)]
        for size in self.plan.page_sizes:
            found += self._stored_and_loaded(STORE, LOAD, size)
            found.append(self._done(STORE_ONE, size, self._store_one))
        return found

    def on_disk(self) -> list[PeerRounds]:
        found = []
        for size in self.plan.page_sizes:
            found += self._stored_and_loaded(DURABLE, COLD, size)
        return found

    def _stored_and_loaded(self, store: str, load: str, page_bytes: int) -> list[PeerRounds]:
        """A load takes what the store has left: without that there is none."""
        stored = self._done(store, page_bytes, self._store)
        if stored.reason:
            return [stored, PeerRounds(load, page_bytes, reason=stored.reason)]
        return [stored, self._done(load, page_bytes, self._load)]

    def _done(self, work: str, page_bytes: int, run: Callable[[PeerRounds], None]) -> PeerRounds:
        """A peer that fails at a work has a reason there; ours may not fail."""
        self._tell(f"{self.peer.kind.title}: {work}, {page_bytes >> 10} KiB")
        rounds = PeerRounds(work, page_bytes)
        try:
            rounds.pages = self._prepare(page_bytes)
            run(rounds)
        except ContenderError as failed:
            if failed.kind is not self.peer.kind:
                raise
            rounds.reason = failed.reason
        return rounds

    def _prepare(self, page_bytes: int) -> int:
        """What is stored of this size stays: a load takes what the store before it left."""
        counts = {side.call("pages", page_bytes=page_bytes) for side in (self.peer, self.ours)}
        return int(counts.pop())

    def _lookup(self, rounds: PeerRounds) -> None:
        for side in (self.peer, self.ours):
            side.call("prompts", keys=self.plan.keys)
        ring = [
            (self.peer, self.peer.ways[0], rounds.peer),
            (self.ours, self.ours.ways[0], rounds.ours),
        ]
        self._turns(ring, lambda side, way: side.call("lookup", calls=self.plan.calls))

    def _store(self, rounds: PeerRounds) -> None:
        self._turns(self._ring(rounds), lambda side, way: side.call("store", way=way))

    def _store_one(self, rounds: PeerRounds) -> None:
        self._turns(self._ring(rounds), lambda side, way: side.call("store_one", way=way))

    def _load(self, rounds: PeerRounds) -> None:
        ring = [(self.peer, way, rounds.peer) for way in self.peer.ways]
        two = any(_TWO_THREADS in way for way in self.peer.ways)
        mine = [way for way in self.ours.ways if two or _TWO_THREADS not in way]
        ring += [(self.ours, way, rounds.ours) for way in mine]
        self._turns(ring, _loaded, _compared)

    def _ring(self, rounds: PeerRounds) -> _Ring:
        """Every way of the peer, and ours as users have it."""
        ring = [(self.peer, way, rounds.peer) for way in self.peer.ways]
        return [*ring, (self.ours, self.ours.ways[0], rounds.ours)]

    def _turns(
        self,
        ring: _Ring,
        run: Callable[[Contender, str], Any],
        warm: Callable[[Contender], None] = lambda side: None,
    ) -> None:
        for turn in range(-_WARM_TURNS, self.plan.rounds):
            for side, way, into in rotated(ring, turn):
                value = run(side, way)
                if turn < 0:
                    warm(side)
                else:
                    into.setdefault(way, []).append(value)


def _loaded(side: Contender, way: str) -> Any:
    return side.call("load", way=way)


def _compared(side: Contender) -> None:
    side.call("compare")
