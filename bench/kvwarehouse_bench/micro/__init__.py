"""`kvwarehouse bench`: a warehouse against this machine's own limits, side by side in one run.

Each measure is a module with `measure(bench)`, or `measure(options)` where it starts what it needs
by itself; it returns Figures and Curves. Rounds alternate between the warehouse and the limit it is
compared with, so that other load on the machine meets both.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from kvwarehouse.cli.commands import command_parser
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json
from kvwarehouse.client import connect
from kvwarehouse.errors import UsageError
from kvwarehouse.sizes import parse_size
from kvwarehouse_bench.micro import restart
from kvwarehouse_bench.micro.conditions import conditions, load_average
from kvwarehouse_bench.micro.figures import Result, print_figures
from kvwarehouse_bench.micro.options import Bench, Options, Sizes
from kvwarehouse_bench.micro.private import private_daemon

SUMMARY = "Measure a warehouse against this machine's own limits."

MEASURES = {
    "lookup": "the longest stored prefix of 2,048 pages, against hashing its tokens alone",
    "load": "loads from DRAM by page size, verified and not, against a plain streaming copy",
    "store": "stores with digests by page size, against a plain streaming copy",
    "exchange": "512 pages sealed and 512 reserved, against a bare round trip",
    "calls": "one call for 1,024 pages, against a call for each",
    "nvme": "writes to NVMe and loads from it, against fio: rates, processor, first page",
    "remote": "loads from a remote store and puts into it, against obstore alone; lookups, memory",
    "verify": "what digests cost loads from DRAM and, with --nvme-dir, from NVMe",
    "restart": "until a killed daemon serves again, with and without its arena",
    "crowd": "eight client processes at once, against as many that only copy",
    "rpc": "gRPC calls and streams, against shared memory",
    "idle": "what an idle daemon costs",
    "memory": "memory a page takes beside its payload",
    "growth": "what an item costs by how many there are; 6 GB of memory",
    "steps": "the longest wait beside clear, evict, a damaged page, pins, status; --pages of 4 KiB",
    "neighbours": "what a client loses beside one that does its worst, of each kind: rate and p99",
    "effects": "what huge pages, prefaulting and the places of slots gain; see docs/benchmarks.md",
    "soak": "churn, crashes and restarts for --minutes: nothing grows, nothing is wrong",
}

EXAMPLES = """\
  kvwarehouse bench                             the quick ones, on a private daemon
  kvwarehouse bench load store --page 8MiB
  kvwarehouse bench nvme --nvme-dir /nvme/scratch
  kvwarehouse bench verify restart --nvme-dir /nvme/scratch      restart takes 11 GB of it
  kvwarehouse bench memory growth --rounds 5                     minutes
  kvwarehouse bench steps --pages 100000
  kvwarehouse bench remote --remote s3://BUCKET/PREFIX           what it puts there is removed
  kvwarehouse bench lookup --address unix:///run/kvwarehouse/kvw.sock --json

Ratios mean more than rates: both sides of each ran in this run, in turns. The table says under
which conditions. On a daemon of yours (--address) the bench's own namespaces are cleared; making
room for them may evict pages of others.
"""

_ALONE = {"remote", "memory", "growth", "steps", "neighbours", "effects", "soak"}
"""Measures that start what they need by themselves."""

_PRIVATE = {"nvme", "verify", "restart", "idle"} | _ALONE
"""Measures that need a daemon of their own."""

_ON_DISK = {"nvme", "verify", "restart"}
"""Measures that have an NVMe tier where --nvme-dir is given."""

_NOT_BY_DEFAULT = {"nvme"} | _ALONE

_NVME_PAGE_BYTES = 256 << 10
"""The smallest that nvme is measured with: smaller ones are written many at a time."""

_ROUNDS = 9
_PAGE = "2MiB"


def command(arguments: list[str]) -> int:
    """Runs the benches; returns the exit status. An entry point of kvwarehouse.commands."""
    parser = command_parser("bench", SUMMARY, EXAMPLES)
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listed = "; ".join(f"{name}: {what}" for name, what in MEASURES.items())
    parser.add_argument(
        "measures",
        nargs="*",
        metavar="MEASURE",
        help=f"Which. {listed}. Default: all but {', '.join(sorted(_NOT_BY_DEFAULT))}.",
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar="N", help="Default: 9.")
    parser.add_argument(
        "--page",
        metavar="SIZE",
        help=f"A page. Default: {_PAGE}, and for load, store and remote smaller and larger ones"
        " too.",
    )
    parser.add_argument(
        "--bytes", default="256MiB", metavar="SIZE", help="KV moved a round. Default: 256MiB."
    )
    parser.add_argument(
        "--nvme-dir",
        metavar="DIR",
        help="For nvme, verify, restart: a directory on the disk to measure; what is written there"
        " is removed.",
    )
    parser.add_argument(
        "--remote",
        default="",
        metavar="URL",
        help="For remote: the store to measure, as serve takes it. What is put there is removed."
        " Default: a folder in memory.",
    )
    parser.add_argument(
        "--remote-config",
        default="",
        metavar="FILE",
        help="For remote: how that store is reached, as serve takes it.",
    )
    parser.add_argument(
        "--pages",
        type=int,
        default=Sizes.stepped,
        metavar="N",
        help="Of steps: pages in the daemon, each in 4 KiB of memory. Default: %(default)s.",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=Sizes.soak_minutes,
        metavar="N",
        help="Of soak. Default: %(default)g.",
    )
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="Measure this daemon (unix:///path). Default: a private one, which"
        f" {', '.join(sorted(_PRIVATE))} need.",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options = options_of(args)
    chosen = args.measures or [name for name in MEASURES if name not in _NOT_BY_DEFAULT]
    results = [run_measure(name, options, args.address) for name in chosen]
    whole = Result(
        " ".join(chosen),
        {**results[0].conditions, "load after": load_average()},
        [each for result in results for each in result.found],
    )
    if args.json:
        print_json(whole.as_json())
    else:
        print_figures(whole.found, whole.conditions)
    return Exit.OK


def run_measure(name: str, options: Options, address: str | None = None) -> Result:
    """One measure, against the daemon at `address` or a private one, and its conditions."""
    module = import_module(f"kvwarehouse_bench.micro.{name}")
    under = conditions(options)
    if name in _ALONE:
        found = module.measure(options)
    else:
        found = []
        for each in by_page(name, options):
            with _started(name, each, address) as bench:
                found += module.measure(bench)
    return Result(name, {**under, "load after": load_average()}, list(found))


def by_page(name: str, options: Options) -> Iterator[Options]:
    """What a measure runs with, each in a daemon of its own: once, and nvme for each size of page
    that tells something of a disk, unless one was named."""
    sizes = options.sizes.page_bytes
    if name != "nvme" or len(sizes) == 1:
        yield options
        return
    for page_bytes in sizes:
        if page_bytes >= _NVME_PAGE_BYTES:
            pages = options.pages_of(page_bytes)
            yield dataclasses.replace(options, page_bytes=page_bytes, pages=pages)


def options_of(args: argparse.Namespace) -> Options:
    for name in args.measures:
        if name not in MEASURES:
            raise _bad(f"{name!r} is no measure; there are {', '.join(MEASURES)}")
    if args.address and _PRIVATE & set(args.measures or MEASURES):
        alone = ", ".join(sorted(_PRIVATE))
        raise _bad(f"--address does not go with {alone}: name the measures, such as load")
    if "nvme" in args.measures and not args.nvme_dir:
        raise _bad("nvme needs --nvme-dir, a directory on the disk to measure")
    if args.remote and "remote" not in args.measures:
        raise _bad("--remote is of no use without the measure remote: name it")
    if args.remote_config and not args.remote:
        raise _bad("--remote-config is of no use without --remote, the URL of the store")
    if not 3 <= args.rounds <= 1000:
        raise _bad(f"--rounds {args.rounds} is out of range; use 3 to 1000")
    if not 0.1 <= args.minutes <= 100_000:
        raise _bad(f"--minutes {args.minutes:g} is out of range; use 0.1 to 100,000")
    if not 1000 <= args.pages <= 10_000_000:
        raise _bad(f"--pages {args.pages} is out of range; use 1,000 to 10,000,000")
    page_bytes = parse_size(args.page or _PAGE, name="--page")
    moved_bytes = parse_size(args.bytes, name="--bytes")
    if not 4096 <= page_bytes <= moved_bytes:
        raise _bad(
            f"--page {args.page or _PAGE} is out of range; use 4KiB to --bytes ({args.bytes})"
        )
    sizes = Sizes(soak_minutes=args.minutes, stepped=args.pages)
    if args.page:
        one = (page_bytes,)
        sizes = dataclasses.replace(sizes, page_bytes=one, remote_page_bytes=one)
    pages = moved_bytes // page_bytes
    return Options(
        args.rounds,
        page_bytes,
        pages,
        args.nvme_dir,
        sizes,
        remote=args.remote,
        remote_config=args.remote_config,
    )


@contextmanager
def _started(name: str, options: Options, address: str | None) -> Iterator[Bench]:
    """A bench with a client of `address`, or of a private daemon with the tiers `name` needs."""
    if address is not None:
        with connect(address) as client:
            yield Bench(options, client, None, None)
        return
    with _scratch(options.nvme_dir if name in _ON_DISK else None) as folder:
        settings = restart.settings(folder) if name == "restart" else _settings(options, folder)
        if folder is not None:
            settings["nvme_dir"] = os.path.join(folder, "tier")
        with private_daemon(settings) as (daemon, client):
            yield Bench(options, client, daemon, folder)


def _settings(options: Options, folder: str | None) -> dict[str, Any]:
    if folder is None:
        return {"dram": options.dram_bytes}
    return {
        "dram": options.dram_bytes,
        "nvme_capacity": options.nvme_bytes,
        "write_queue": options.moved_bytes * 2,
    }


@contextmanager
def _scratch(nvme_dir: str | None) -> Iterator[str | None]:
    if nvme_dir is None:
        yield None
        return
    try:
        with tempfile.TemporaryDirectory(prefix="kvw-bench-", dir=nvme_dir) as folder:
            yield folder
    except OSError as error:
        raise _bad(f"--nvme-dir {nvme_dir}: {error.strerror or error}") from error


def _bad(message: str) -> UsageError:
    return UsageError(message, code="bad_bench")
