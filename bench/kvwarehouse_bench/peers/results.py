"""What a run of the peers found, and what is read off it. Ratios are the warehouse's speed over the
peer's, round by round: above 1 the warehouse is the quicker."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvwarehouse_bench.harness.alternation import Spread, middle_half, percentile, ratios
from kvwarehouse_bench.peers.contenders import ContenderKind
from kvwarehouse_bench.peers.workloads import PeerRounds

GIGABYTE = 1e9
VERIFIED, BOUNDARY, TWO_THREADS = "verified", "boundary", "verified, 2 threads"
"""Ways of the warehouse (stores/warehouse.py)."""
FLIPS = "flips"


@dataclass
class PeerResult:
    """about: what the store says of itself, by where it keeps pages. reasons: why there is nothing,
    likewise, and for flips."""

    kind: ContenderKind
    about: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    rounds: list[PeerRounds] = field(default_factory=list)
    flips: Mapping[str, int] | None = None


@dataclass
class PeersResults:
    conditions: dict[str, str]
    copy_bytes_per_s: float
    ours: PeerResult
    peers: list[PeerResult] = field(default_factory=list)

    def of(self, work: str) -> Iterator[tuple[PeerResult, PeerRounds]]:
        for peer in self.peers:
            for rounds in peer.rounds:
                if rounds.work == work:
                    yield peer, rounds


@dataclass(frozen=True)
class Compared:
    """One way of a peer beside one of ours, over the same rounds."""

    peer: Sequence[float]
    ours: Sequence[float]

    @property
    def ratio(self) -> Spread:
        return ratios(self.peer, self.ours)


def compared(rounds: PeerRounds, way: str, mine: str) -> Compared | None:
    """Seconds of rounds; of single calls the p50 of each round."""
    if way not in rounds.peer or mine not in rounds.ours:
        return None
    theirs, ours = rounds.peer[way], rounds.ours[mine]
    whole = min(len(theirs), len(ours))  # a peer that failed may have one more than ours, or less
    if not whole:
        return None
    return Compared([_one(each) for each in theirs[:whole]], [_one(each) for each in ours[:whole]])


def rate(rounds: PeerRounds, seconds: Sequence[float]) -> Spread:
    """GB/s of pages."""
    moved = rounds.pages * rounds.page_bytes / GIGABYTE
    return middle_half([moved / each for each in seconds])


def tail_us(values: Sequence[Any]) -> float:
    """The median of the rounds' p99."""
    return statistics.median(1e6 * percentile(each, 0.99) for each in values)


def equal_threads(way: str) -> str:
    """Ours that a peer's way is compared with."""
    return TWO_THREADS if "2 threads" in way else VERIFIED


def _one(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else percentile(value, 0.5)
