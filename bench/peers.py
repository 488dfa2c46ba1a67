"""The same work on kvwarehouse and on what a user would pick instead.

.venv/bin/python bench/peers.py --help
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from kvwarehouse.errors import UsageError
from kvwarehouse.report.report import Report
from kvwarehouse.sizes import format_size, parse_size
from kvwarehouse_bench.harness.bitmap import write_png
from kvwarehouse_bench.harness.frame import BenchProgress, bench_parser, numbers, run
from kvwarehouse_bench.micro.conditions import commit, load_average, processor
from kvwarehouse_bench.micro.load import copy_bytes_per_s
from kvwarehouse_bench.peers.contenders import (
    DISK,
    MEMORY,
    OURS,
    PEERS,
    Contender,
    ContenderError,
    ContenderKind,
)
from kvwarehouse_bench.peers.report import peers_report, pictures, with_report
from kvwarehouse_bench.peers.results import FLIPS, PeerResult, PeersResults
from kvwarehouse_bench.peers.workloads import ContenderPair, PeerPlan

ABOUT = """\
Lookups, loads, stores and, on the disk, durable stores, cold loads and flipped bytes: of the
warehouse and of each peer that runs here, in turns, with the same pages and one Python thread each.
A peer that does not run is a row that says why. Their environments: make setup-peers."""

EXAMPLES = """\
  bench/peers.py                                all peers, all works; some minutes on two cores
  bench/peers.py --quick
  bench/peers.py --peers files,lmdb --places memory --rounds 9 --json peers.json --html peers.html
  bench/peers.py --dir /nvme/scratch            the disk to measure"""

_DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
_PICTURES = "images"
_PAGES, _QUICK_PAGES = "256KiB,2MiB,8MiB", "64KiB,1MiB"
_ROUNDS, _QUICK_ROUNDS = 5, 2
_BYTES, _QUICK_BYTES = "128MiB", "16MiB"
_KEYS, _CALLS, _QUICK_CALLS = 2048, 160, 16
_LEAST_PAGE_BYTES = 4096
_FLIPPED_PAGES = 8


def main() -> int:
    parser = bench_parser("peers", ABOUT, EXAMPLES)
    names = ",".join(kind.key for kind in PEERS)
    parser.add_argument("--peers", default=names, metavar="NAME,...", help="Default: %(default)s.")
    parser.add_argument(
        "--places",
        default=f"{MEMORY},{DISK}",
        metavar="NAME,...",
        help="Where pages are kept. Default: %(default)s.",
    )
    parser.add_argument("--pages", metavar="SIZE,...", help=f"Default: {_PAGES}.")
    parser.add_argument("--bytes", metavar="SIZE", help=f"Moved in a round. Default: {_BYTES}.")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"Default: {_ROUNDS}.")
    parser.add_argument(
        "--keys",
        type=int,
        default=_KEYS,
        metavar="N",
        help="Pages looked up. Default: %(default)s.",
    )
    parser.add_argument(
        "--write", action="store_true", help="Also docs/benchmarks.md and its pictures."
    )
    return run(parser, measure)


def measure(args: argparse.Namespace, folder: Path, teller: BenchProgress) -> Report:
    if args.write:  # before minutes of measuring, not after them
        _document_with(Report("", "", [], {}))
    report = _measured(args, folder, teller)
    if args.write:
        _DOCUMENT.write_text(_document_with(report), encoding="utf-8")
        for name, plot in pictures(report).items():
            write_png(plot, _DOCUMENT.parent / _PICTURES / name)
    return report


def _document_with(report: Report) -> str:
    return with_report(_DOCUMENT.read_text("utf-8"), report, _PICTURES)


def _measured(args: argparse.Namespace, folder: Path, teller: BenchProgress) -> Report:
    plan = _plan(args)
    moved_bytes = _moved_bytes(args, plan)
    kinds = [kind for kind in PEERS if kind.key in _chosen(args.peers, [k.key for k in PEERS])]
    places = _chosen(args.places, [MEMORY, DISK])
    copied = copy_bytes_per_s()
    found = PeersResults(_conditions(plan, moved_bytes), copied, PeerResult(OURS))
    found.conditions["plain streaming copy"] = f"{copied / 1e9:.1f} GB/s, one thread"
    found.peers = [PeerResult(kind) for kind in kinds]
    teller.expect(sum(place in kind.places for kind in kinds for place in places))
    for place in places:
        where = Where(folder, moved_bytes, place)
        with where.started(OURS) as ours:
            found.ours.about[place] = ours.about
            for peer in found.peers:
                if place in peer.kind.places:
                    _beside(peer, ours, where, plan, teller)
            if place == DISK:
                _flip(found.ours, ours, plan)
    found.conditions["load after"] = load_average()
    return peers_report(found)


@dataclass(frozen=True)
class Where:
    folder: Path
    moved_bytes: int
    place: str

    def started(self, kind: ContenderKind) -> Contender:
        return Contender(kind, self.folder, self.moved_bytes, self.place)


def _beside(
    peer: PeerResult, ours: Contender, where: Where, plan: PeerPlan, teller: BenchProgress
) -> None:
    """Whatever ends the peer is a reason in its rows."""
    teller.step(f"{peer.kind.title} starts")
    try:
        with where.started(peer.kind) as side:
            peer.about[where.place] = side.about
            pair = ContenderPair(side, ours, plan, teller.step)
            peer.rounds += pair.in_memory() if where.place == MEMORY else pair.on_disk()
            if where.place == DISK:
                _flip(peer, side, plan)
    except ContenderError as failed:
        if failed.kind is OURS:
            raise
        peer.reasons[where.place] = failed.reason
        teller.say(f"{peer.kind.title} did not run: {failed.reason}")
    teller.step("", 1)


def _flip(store: PeerResult, side: Contender, plan: PeerPlan) -> None:
    try:
        side.call("pages", page_bytes=plan.page_sizes[0])
        store.flips = side.call("flip")
    except ContenderError as failed:
        if failed.kind is OURS:
            raise
        store.reasons[FLIPS] = failed.reason


def _plan(args: argparse.Namespace) -> PeerPlan:
    sizes = (args.pages or (_QUICK_PAGES if args.quick else _PAGES)).split(",")
    rounds = _QUICK_ROUNDS if args.quick else _ROUNDS
    if args.rounds is not None:
        rounds = args.rounds
    numbers(str(rounds), "--rounds", 1, 1000)
    numbers(str(args.keys), "--keys", 1, 65536)
    return PeerPlan(
        page_sizes=sorted({parse_size(size, name="--pages") for size in sizes}),
        rounds=rounds,
        keys=args.keys,
        calls=_QUICK_CALLS if args.quick else _CALLS,
    )


def _moved_bytes(args: argparse.Namespace, plan: PeerPlan) -> int:
    text = args.bytes or (_QUICK_BYTES if args.quick else _BYTES)
    moved = parse_size(text, name="--bytes")
    least = max(_FLIPPED_PAGES * plan.page_sizes[0], plan.page_sizes[-1])
    least = max(least, plan.keys * _LEAST_PAGE_BYTES)
    if moved < least or moved % _LEAST_PAGE_BYTES:
        raise _bad(f"--bytes {text}: use whole 4 KiB, {format_size(least)} at least")
    if plan.page_sizes[0] < _LEAST_PAGE_BYTES or any(
        s % _LEAST_PAGE_BYTES for s in plan.page_sizes
    ):
        raise _bad("--pages: use whole 4 KiB, as direct I/O does")
    return moved


def _chosen(text: str, known: list[str]) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in known:
            raise _bad(f"there is no {name!r}; there are {', '.join(known)}")
    return [name for name in known if name in chosen]


def _conditions(plan: PeerPlan, moved_bytes: int) -> dict[str, str]:
    sizes = ", ".join(format_size(size) for size in plan.page_sizes)
    return {
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores usable",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "pages": f"{sizes}; {format_size(moved_bytes)} a round",
        "rounds": f"{plan.rounds}, both sides in turns, after two that do not count",
        "lookups": f"{plan.calls} a round, of {plan.keys:,} pages, 8 prompts in turns",
        "warehouse": commit(),
        "load before": load_average(),
    }


def _bad(message: str) -> UsageError:
    return UsageError(message, code="bad_bench")


if __name__ == "__main__":
    sys.exit(main())
