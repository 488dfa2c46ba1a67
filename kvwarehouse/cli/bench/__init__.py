"""`kvwarehouse bench`: a warehouse against this machine's own limits, side by side in one run.

Each measure is a module with `measure(bench) -> list[Figure]`. Rounds alternate between the
warehouse and the limit it is compared with, so that other load on the machine meets both.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from kvwarehouse.cli.bench import restart
from kvwarehouse.cli.bench.conditions import conditions, load_average
from kvwarehouse.cli.bench.figures import Figure, print_figures
from kvwarehouse.cli.bench.options import Bench, Options
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json
from kvwarehouse.client import Client, connect
from kvwarehouse.embedded import PrivateDaemon
from kvwarehouse.errors import CapacityError, UsageError
from kvwarehouse.sizes import parse_size

MEASURES = {
    "lookup": "the longest stored prefix of 2,048 pages, against hashing its tokens alone",
    "load": "verified loads from DRAM, against a plain streaming copy",
    "store": "stores with digests, against a plain streaming copy",
    "nvme": "writes to NVMe and loads from it, against fio",
    "verify": "what digests cost loads from DRAM and, with --nvme-dir, from NVMe",
    "restart": "until a killed daemon serves again, with and without its arena",
    "crowd": "eight client processes at once, against as many that only copy",
    "rpc": "gRPC calls and streams, against shared memory",
    "idle": "what an idle daemon costs",
}

EXAMPLES = """\
  kvwarehouse bench                             all of them but nvme, on a private daemon
  kvwarehouse bench load store --page 8MiB
  kvwarehouse bench nvme --nvme-dir /nvme/scratch
  kvwarehouse bench verify restart --nvme-dir /nvme/scratch      restart takes 11 GB of it
  kvwarehouse bench lookup --address unix:///run/kvwarehouse/kvw.sock --json

Ratios mean more than rates: both sides of each ran in this run, in turns. The table says under
which conditions. On a daemon of yours (--address) the bench's own namespaces are cleared; making
room for them may evict pages of others.
"""

_PRIVATE = {"nvme", "verify", "restart", "idle"}
"""Measures that need a daemon of their own."""

_ON_DISK = {"nvme", "verify", "restart"}
"""Measures that have an NVMe tier where --nvme-dir is given."""

_ROUNDS = 9
_SETTLE_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listed = "; ".join(f"{name}: {what}" for name, what in MEASURES.items())
    parser.add_argument(
        "measures", nargs="*", metavar="MEASURE", help=f"Which. {listed}. Default: all but nvme."
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar="N", help="Default: 9.")
    parser.add_argument("--page", default="2MiB", metavar="SIZE", help="A page. Default: 2MiB.")
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
        "--address",
        metavar="ADDRESS",
        help="Measure this daemon (unix:///path). Default: a private one, which"
        f" {', '.join(sorted(_PRIVATE))} need.",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    options = _options(args)
    chosen = args.measures or [name for name in MEASURES if name != "nvme"]
    found: list[Figure] = []
    conditions_now = conditions(options)
    for name in chosen:
        with _started(name, options, args.address) as bench:
            found += import_module(f"kvwarehouse.cli.bench.{name}").measure(bench)
    conditions_now["load after"] = load_average()
    if args.json:
        print_json({"conditions": conditions_now, "figures": [_plain(each) for each in found]})
    else:
        print_figures(found, conditions_now)
    return Exit.OK


def _options(args: argparse.Namespace) -> Options:
    for name in args.measures:
        if name not in MEASURES:
            raise _bad(f"{name!r} is no measure; there are {', '.join(MEASURES)}")
    if args.address and _PRIVATE & set(args.measures or MEASURES):
        alone = ", ".join(sorted(_PRIVATE))
        raise _bad(f"--address does not go with {alone}: name the measures, such as load")
    if "nvme" in args.measures and not args.nvme_dir:
        raise _bad("nvme needs --nvme-dir, a directory on the disk to measure")
    if not 3 <= args.rounds <= 1000:
        raise _bad(f"--rounds {args.rounds} is out of range; use 3 to 1000")
    page_bytes = parse_size(args.page, name="--page")
    moved_bytes = parse_size(args.bytes, name="--bytes")
    if not 4096 <= page_bytes <= moved_bytes:
        raise _bad(f"--page {args.page} is out of range; use 4KiB to --bytes ({args.bytes})")
    return Options(args.rounds, page_bytes, moved_bytes // page_bytes, args.nvme_dir)


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
        with PrivateDaemon(settings) as daemon, connect(daemon.address) as client:
            _settle(client)
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


def _settle(client: Client) -> None:
    """Waits until the daemon has taken its memory: taking it would be measured too."""
    end = time.monotonic() + _SETTLE_S
    while client.status()["core"]["tiers"]["dram"]["health"] == "populating":
        if time.monotonic() > end:
            raise CapacityError(
                f"the private daemon has not taken its memory within {_SETTLE_S:.0f} s; use a"
                " smaller --bytes",
                code="bench_room",
            )
        time.sleep(0.1)


def _plain(figure: Figure) -> dict[str, Any]:
    fields = dataclasses.asdict(figure)
    del fields["ratio_of_rounds"]
    return {**fields, "ratio": figure.ratio}


def _bad(message: str) -> UsageError:
    return UsageError(message, code="bad_bench")
