"""What bench/peers.py found, as tables, plots and figures, and as the part of a Markdown document
that stands between its marks. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvwarehouse.report.report import Plot, Report, Series, TableBlock
from kvwarehouse.sizes import format_size
from kvwarehouse_bench.harness.markdown import markdown_blocks, picture_name, replace_section
from kvwarehouse_bench.peers.contenders import DISK, MEMORY
from kvwarehouse_bench.peers.goals import MISSED, flipped_words, goals
from kvwarehouse_bench.peers.results import (
    BOUNDARY,
    FLIPS,
    GIGABYTE,
    TWO_THREADS,
    VERIFIED,
    Compared,
    PeerResult,
    PeersResults,
    compared,
    equal_threads,
    rate,
    tail_us,
)
from kvwarehouse_bench.peers.store import ONLY
from kvwarehouse_bench.peers.workloads import (
    COLD,
    DURABLE,
    LOAD,
    LOOKUP,
    STORE,
    STORE_ONE,
    PeerRounds,
)

_NOTES = (
    "Medians over rounds; in brackets the middle half of the rounds' own ratios, which are our"
    " speed over the peer's: above 1 the warehouse is the quicker.",
    "Every client is one Python thread in a process of its own; both sides of a ratio ran in"
    " turns. The stamps of every page were looked at after every load, all bytes after the first"
    " two.",
    "Lookups: peers are given keys and say which are there. The warehouse is given tokens: it"
    " hashes them, finds the longest prefix and says how many of its pages are in which tier."
    " Pages have 4 KiB there, which is the least work for stores that touch values.",
    "Stores: the warehouse makes a digest of every page; no peer here does. Loads: `verified`"
    " checks it, `boundary` trusts DRAM that a client of this daemon filled.",
    "Files and LMDB are in the page cache in the tables of memory: the kernel's memory, lost with"
    " the machine, as all else there is.",
    "Stores to the disk end where the store says that they have: see durability. What lies below"
    " this machine's own caches (a hypervisor's, a drive's) is not emptied before loads.",
)


_ABOUT = ("version", "layout", "durability", "lookup", "start")

BEGIN: Final = "<!-- beside the peers: written by make bench-peers ARGS=--write, do not edit -->\n"
END: Final = "<!-- end of beside the peers -->\n"
_PREFIX = "peers"


def peers_report(found: PeersResults) -> Report:
    return Report(
        title="Beside the peers",
        summary=_summary(found),
        blocks=[
            TableBlock("goals", ("goal", "seen", ""), _goals(found)),
            TableBlock("conditions", ("", ""), [*found.conditions.items()]),
            _stores(found),
            *(block for block in _measured(found) if block.rows),
            *(plot for plot in _plots(found) if plot.series),
        ],
        figures=_figures(found),
        notes=_NOTES,
    )


def _measured(found: PeersResults) -> list[TableBlock]:
    return [
        _lookups(found),
        _moved(found, LOAD, "loads from memory, GB/s", MEMORY),
        _moved(found, STORE, "stores to memory, GB/s", MEMORY),
        _alone(found),
        _moved(found, DURABLE, "stores to the disk, GB/s", DISK),
        _moved(found, COLD, "loads from the disk alone, GB/s", DISK),
        _flips(found),
    ]


def _plots(found: PeersResults) -> list[Plot]:
    return [
        _plot(found, LOAD, "Loads from memory"),
        _plot(found, STORE, "Stores to memory"),
        _plot(found, COLD, "Loads from the disk alone"),
    ]


def _summary(found: PeersResults) -> str:
    asked = goals(found)
    missed = [goal.text for goal in asked if goal.met is False]
    measured = sum(goal.met is not None for goal in asked)
    said = f"{measured - len(missed)} of {measured} goals met"
    return f"{said}; missed: {'; '.join(missed)}." if missed else f"{said}."


def _goals(found: PeersResults) -> list[tuple[str, str, str]]:
    return [(goal.text, goal.seen, goal.verdict) for goal in goals(found)]


def _stores(found: PeersResults) -> TableBlock:
    rows = []
    for store in [found.ours, *found.peers]:
        for place, about in store.about.items():
            rows.append([store.kind.title, place, *(about[name] for name in _ABOUT)])
        for place, reason in store.reasons.items():
            if place != FLIPS:
                rows.append([store.kind.title, place, f"did not run: {reason}", *[""] * 4])
    columns = ("store", "pages in", "version", "layout", "durability", "a lookup", "started as")
    return TableBlock("what ran", columns, rows)


def _lookups(found: PeersResults) -> TableBlock:
    rows = []
    for peer, rounds in found.of(LOOKUP):
        for way, theirs in rounds.peer.items():
            each = compared(rounds, way, VERIFIED)
            if each is not None:
                ours = rounds.ours[VERIFIED]
                cells = [*_calls_us(each.peer, theirs), *_calls_us(each.ours, ours)]
                given = peer.about[MEMORY]["lookup"]
                rows.append([peer.kind.title, *cells, f"{each.ratio:.1f}", given])
        rows += _why(peer, rounds.reason, 7)
    rows += _absent(found, MEMORY, 7)
    columns = ("store", ">p50", ">p99", ">ours p50", ">ours p99", ">ratio", "what the peer does")
    return TableBlock("lookup of a prompt whose pages are all stored, us", columns, rows)


def _calls_us(p50s_s: Sequence[float], calls: Sequence[Any]) -> list[str]:
    return [f"{1e6 * statistics.median(p50s_s):,.0f}", f"{tail_us(calls):,.0f}"]


def _moved(found: PeersResults, work: str, title: str, place: str) -> TableBlock:
    with_boundary = work == LOAD
    rows = []
    for peer, rounds in found.of(work):
        for way in rounds.peer:
            mine = equal_threads(way) if work == LOAD else VERIFIED
            each = compared(rounds, way, mine)
            if each is None:
                continue
            row = [_named(peer, way), format_size(rounds.page_bytes), *_rates(rounds, each)]
            if with_boundary:
                trusting = compared(rounds, way, BOUNDARY) if mine == VERIFIED else None
                row += _rates(rounds, trusting)[1:] if trusting else ["", ""]
            rows.append(row)
        rows += _why(peer, rounds.reason, 7 if with_boundary else 5)
    rows += _absent(found, place, 7 if with_boundary else 5)
    columns = ["store", ">page", ">peer", ">ours", ">ratio"]
    return TableBlock(
        title, [*columns, ">ours, boundary", ">ratio"] if with_boundary else columns, rows
    )


def _rates(rounds: PeerRounds, each: Compared) -> list[str]:
    theirs, ours = rate(rounds, each.peer), rate(rounds, each.ours)
    return [f"{theirs.median:.2f}", f"{ours.median:.2f}", f"{each.ratio:.2f}"]


def _alone(found: PeersResults) -> TableBlock:
    rows = []
    for peer, rounds in found.of(STORE_ONE):
        for way in rounds.peer:
            each = compared(rounds, way, VERIFIED)
            if each is not None:
                times = [f"{1e6 * statistics.median(side):,.0f}" for side in (each.peer, each.ours)]
                size = format_size(rounds.page_bytes)
                rows.append([_named(peer, way), size, *times, f"{each.ratio:.2f}"])
        rows += _why(peer, rounds.reason, 5)
    rows += _absent(found, MEMORY, 5)
    columns = ("store", ">page", ">peer p50", ">ours p50", ">ratio")
    return TableBlock("store of one page to memory, us", columns, rows)


def _flips(found: PeersResults) -> TableBlock:
    rows = []
    for store in [found.ours, *found.peers]:
        if store.flips is not None:
            others = f"{store.flips['others_right']} of {store.flips['others']}"
            rows.append([store.kind.title, flipped_words(store.flips), others])
        elif FLIPS in store.reasons:
            rows.append([store.kind.title, f"not tried: {store.reasons[FLIPS]}", ""])
    rows += _absent(found, DISK, 3)
    columns = ("store", "loads of the damaged pages", "neighbours served")
    return TableBlock("one byte changed on the disk in each of some pages", columns, rows)


def _named(peer: PeerResult, way: str) -> str:
    return peer.kind.title if way == ONLY else f"{peer.kind.title}, {way}"


def _why(peer: PeerResult, reason: str, columns: int) -> list[list[str]]:
    return [[f"{peer.kind.title}: failed: {reason}", *[""] * (columns - 1)]] if reason else []


def _absent(found: PeersResults, place: str, columns: int) -> list[list[str]]:
    return [
        [f"{peer.kind.title}: did not run, see above", *[""] * (columns - 1)]
        for peer in found.peers
        if place in peer.reasons
    ]


def _plot(found: PeersResults, work: str, title: str) -> Plot:
    """Of ours all rounds, whichever peer they ran beside; of a peer its best way with as many
    threads."""
    ours: dict[str, dict[int, list[float]]] = {}
    peers: dict[str, dict[int, list[float]]] = {}
    for peer, rounds in found.of(work):
        for way, seconds in rounds.ours.items():
            _add(ours, f"kvwarehouse, {way}", rounds, _rates_of(rounds, seconds))
        for way, seconds in rounds.peer.items():
            two = ", 2 threads" if equal_threads(way) == TWO_THREADS else ""
            _add(
                peers,
                peer.kind.title + two,
                rounds,
                [statistics.median(_rates_of(rounds, seconds))],
            )
    lines = [_series(name, sizes, statistics.median) for name, sizes in ours.items()]
    lines += [_series(name, sizes, max) for name, sizes in peers.items()]
    return Plot(f"{title}, by page size", "page, MiB", "GB/s, median", lines, log_x=True)


def _add(
    lines: dict[str, dict[int, list[float]]], name: str, rounds: PeerRounds, rates: Sequence[float]
) -> None:
    lines.setdefault(name, {}).setdefault(rounds.page_bytes, []).extend(rates)


def _rates_of(rounds: PeerRounds, seconds: Sequence[float]) -> list[float]:
    return [rounds.pages * rounds.page_bytes / each / GIGABYTE for each in seconds]


def _series(name: str, sizes: dict[int, list[float]], of: Callable[[list[float]], float]) -> Series:
    return Series(name, [(size / (1 << 20), of(rates)) for size, rates in sorted(sizes.items())])


def _figures(found: PeersResults) -> dict[str, Any]:
    return {
        "conditions": found.conditions,
        "copy_bytes_per_s": found.copy_bytes_per_s,
        "goals": [{"goal": goal.text, "seen": goal.seen, "met": goal.met} for goal in goals(found)],
        "stores": [
            {
                "store": store.kind.title,
                "about": store.about,
                "did_not_run": store.reasons,
                "works": [vars(rounds) for rounds in store.rounds],
                "flips": store.flips,
            }
            for store in [found.ours, *found.peers]
        ],
    }


def with_report(document: str, report: Report, pictures: str) -> str:
    """pictures: the folder of pictures(...), as links from the document see it. ValueError when it
    has no marks."""
    parts = [report.summary, *(f"- {note}" for note in report.notes)]
    text = "\n".join(parts)
    for block in report.blocks:
        part = markdown_blocks([block], pictures, _PREFIX, bold=[MISSED])[0]
        heading = f"### {_capital(block.title)}\n\n" if isinstance(block, TableBlock) else ""
        text += f"\n\n{heading}{part}"
    return replace_section(document, BEGIN, END, f"\n{text}\n\n")


def pictures(report: Report) -> dict[str, Plot]:
    """By the name of the file."""
    return {
        picture_name(block, _PREFIX): block for block in report.blocks if isinstance(block, Plot)
    }


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]
