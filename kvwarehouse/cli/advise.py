"""`kvwarehouse advise`: what more, or less, DRAM and NVMe would bring a running warehouse."""

from __future__ import annotations

import argparse

from kvwarehouse.cli.connection import add_connection, connect_from, find_namespace
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_report_output, print_report
from kvwarehouse.client import Client
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.errors import UsageError
from kvwarehouse.planning.advise import NamespaceCurve, TierSetup, advise
from kvwarehouse.sizes import parse_size

EXAMPLES = """\
  kvwarehouse advise
  kvwarehouse advise --prefill-tokens-per-s 25000      in time, too: what one engine computes
  kvwarehouse advise my-model --json
  kvwarehouse advise --html curve.html                 the miss-ratio curve

From what the daemon has seen since its start, at no cost to it: docs/sizing.md says how. Before
there is a daemon, `kvwarehouse replay` answers from a trace.
"""

_DRAM_READ = "5GB"
_NVME_READ = "3GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "namespace", nargs="?", metavar="NAMESPACE", help="Only this one. Default: all."
    )
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=float,
        metavar="RATE",
        help="What the engine computes where nothing is stored; then the tables speak of time.",
    )
    parser.add_argument(
        "--dram-read",
        default=_DRAM_READ,
        metavar="SIZE",
        help=f"Loads from DRAM, a second (default: {_DRAM_READ}).",
    )
    parser.add_argument(
        "--nvme-read",
        metavar="SIZE",
        help=f"Loads from NVMe, a second (default: as measured by the daemon, else {_NVME_READ}).",
    )
    add_connection(parser)
    add_report_output(parser)


def run(args: argparse.Namespace) -> int:
    with connect_from(args) as client:
        every = args.namespace is None
        found = client.namespaces() if every else [find_namespace(client, args.namespace)]
        parts = [_part(client, each) for each in found]
        report = advise(parts, _tiers(client, args), all_uses=client.miss_ratio().uses)
    print_report(report, args)
    return Exit.OK


def _part(client: Client, stored: StoredNamespace) -> NamespaceCurve:
    fields = stored.fields
    return NamespaceCurve(
        fields["model"],
        fields["page_bytes"] * fields["shards"],
        fields["page_tokens"],
        client.miss_ratio(stored),
    )


def _tiers(client: Client, args: argparse.Namespace) -> TierSetup:
    if args.prefill_tokens_per_s is not None and not 0 < args.prefill_tokens_per_s < 1e9:
        raise UsageError(
            f"--prefill-tokens-per-s {args.prefill_tokens_per_s:g} cannot be; use a positive rate",
            code="bad_rate",
        )
    core = client.status()["core"]
    tiers = core["tiers"]
    measured = tiers["nvme"]["read_bytes_per_s"]
    nvme_read = (
        _rate(args.nvme_read or _NVME_READ, "--nvme-read")
        if args.nvme_read or not measured
        else float(measured)
    )
    return TierSetup(
        tiers["dram"]["capacity_bytes"],
        tiers["nvme"]["capacity_bytes"],
        _rate(args.dram_read, "--dram-read"),
        nvme_read,
        args.prefill_tokens_per_s,
        core["policy"],
        tiers["nvme"].get("budget_bytes_per_day", 0),
        core["stores"]["stored_again"].get("write_budget", 0),
    )


def _rate(text: str, flag: str) -> float:
    rate = parse_size(text, name=flag)
    if rate < 1:
        raise UsageError(f"{flag} {text} cannot be; use 1 byte a second or more", code="bad_rate")
    return float(rate)
