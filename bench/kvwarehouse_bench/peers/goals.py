"""What the project asks of itself beside its peers, and whether a run saw it. Stateless."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvwarehouse.sizes import format_size
from kvwarehouse_bench.harness.alternation import percentile
from kvwarehouse_bench.peers.results import (
    BOUNDARY,
    VERIFIED,
    PeersResults,
    compared,
    equal_threads,
)
from kvwarehouse_bench.peers.workloads import LOAD, LOOKUP, STORE, STORE_ONE

_LOOKUP_RATIO, _LOOKUP_US = 5.0, 100.0
_LOAD_RATIO, _STORE_RATIO, _STORE_ONE_RATIO = 1.1, 1.0, 3.0
# The largest pages that a work is judged by: of larger ones the copy alone takes longer than a
# third of the peer's time.
_MOST_BYTES = {STORE_ONE: 2 << 20}
MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"


@dataclass(frozen=True)
class PeerGoal:
    text: str
    seen: str
    met: bool | None
    """None: not measured."""

    @property
    def verdict(self) -> str:
        return NOT_MEASURED if self.met is None else MET if self.met else MISSED


def goals(found: PeersResults) -> list[PeerGoal]:
    return [
        _lookups(found),
        _lookup_time(found),
        _at_least(found, LOAD, "mooncake", _LOAD_RATIO, "loads, verified"),
        _at_least(found, LOAD, "mooncake", _LOAD_RATIO, "loads, boundary", mine=BOUNDARY),
        _at_least(found, LOAD, "lmcache", 1.0, "loads, verified, as many threads"),
        _at_least(found, STORE, "mooncake", _STORE_RATIO, "stores"),
        _at_least(found, STORE_ONE, "mooncake", _STORE_ONE_RATIO, "stores of one page, p50"),
        _flips(found),
    ]


def _lookups(found: PeersResults) -> PeerGoal:
    seen = {
        peer.kind.title: each.ratio.median
        for peer, rounds in found.of(LOOKUP)
        for way in rounds.peer
        if (each := compared(rounds, way, VERIFIED)) is not None
    }
    text = f"lookups at least {_LOOKUP_RATIO:g} times as fast as the best peer's"
    if not seen:
        return PeerGoal(text, "", None)
    best = min(seen, key=lambda title: seen[title])
    return PeerGoal(text, f"{seen[best]:.1f} ({best})", seen[best] >= _LOOKUP_RATIO)


def _lookup_time(found: PeersResults) -> PeerGoal:
    """Of all rounds; and of those beside each peer, for a peer's threads may be in the way."""
    beside = [
        [1e6 * percentile(each, 0.5) for values in rounds.ours.values() for each in values]
        for _, rounds in found.of(LOOKUP)
    ]
    text = f"p50 of a lookup under {_LOOKUP_US:g} us"
    medians = [statistics.median(rounds) for rounds in beside if rounds]
    if not medians:
        return PeerGoal(text, "", None)
    p50_us = statistics.median(each for rounds in beside for each in rounds)
    spread = f"{min(medians):.0f} to {max(medians):.0f} beside one peer or another"
    return PeerGoal(text, f"{p50_us:.0f} us; {spread}", p50_us < _LOOKUP_US)


def _at_least(
    found: PeersResults, work: str, peer: str, least: float, what: str, *, mine: str = ""
) -> PeerGoal:
    """At every page size and way of the peer, beside ours with as many threads."""
    named = [other.kind.title for other in found.peers if other.kind.key == peer]
    most_bytes = _MOST_BYTES.get(work)
    if most_bytes is not None:
        what += f", up to {format_size(most_bytes)}"
    text = f"{what}: at least {least:g} times as fast as {named[0] if named else peer}"
    choose: Callable[[str], str] = (lambda way: mine) if mine else equal_threads
    if work != LOAD:
        choose = _only
    seen = [
        (f"{format_size(rounds.page_bytes)}", each.ratio.median)
        for other, rounds in found.of(work)
        if other.kind.key == peer and (most_bytes is None or rounds.page_bytes <= most_bytes)
        for way in rounds.peer
        if (each := compared(rounds, way, choose(way))) is not None
    ]
    if not seen:
        return PeerGoal(text, "", None)
    said = ", ".join(f"{ratio:.2f} ({size})" for size, ratio in seen)
    return PeerGoal(text, said, all(ratio >= least for _, ratio in seen))


def _only(way: str) -> str:
    return VERIFIED


def _flips(found: PeersResults) -> PeerGoal:
    text = "a flipped byte is a miss, and its neighbours are served"
    flips = found.ours.flips
    if flips is None:
        return PeerGoal(text, "", None)
    met = flips["miss"] == flips["flipped"] and flips["others_right"] == flips["others"]
    return PeerGoal(text, flipped_words(flips), met)


def flipped_words(counts: Mapping[str, int]) -> str:
    words = {
        "wrong": "returned as a hit",
        "miss": "miss",
        "error": "error",
        "right": "right: the damage was not read",
    }
    said: Sequence[str] = [
        f"{counts[kind]} of {counts['flipped']} {word}"
        for kind, word in words.items()
        if counts[kind]
    ]
    return ", ".join(said)
