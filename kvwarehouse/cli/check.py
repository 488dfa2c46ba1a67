"""`kvwarehouse check`: verifies stored pages, of a daemon or of directories without one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rich.progress import Progress, TextColumn, TimeElapsedColumn

from kvwarehouse.cli.check_report import Report, show
from kvwarehouse.cli.connection import add_connection, connect_from
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, console
from kvwarehouse.cli.selection import find_namespace
from kvwarehouse.errors import UsageError
from kvwarehouse.sizes import format_size
from kvwarehouse.types import CheckProgress

EXAMPLES = """\
  kvwarehouse check                     all pages in both tiers; nothing is changed
  kvwarehouse check my-model --repair   one namespace; damaged pages are quarantined
  kvwarehouse check --nvme-dir DIR      segments without a running daemon

A page that is in DRAM and on NVMe has two copies, and each is read and judged by itself: its
header, its place, its key and the digest of every shard. --repair drops the bad copy alone; a page
that is good in DRAM is then written to NVMe again, and a bad record stays away over restarts. A
record that the device could not read (io_error) is dropped only until the next start, which looks
again.

With --nvme-dir, --arena-dir or both, the directories of a stopped daemon are opened. Segments and
ledger stay as they are unless --repair drops something; an arena gets a new index, and what was
being stored in it ends, as at every start. Namespaces and tombstones come from the ledger, so the
directory that has it (the NVMe one, if there is one) must be named.

Exit status 0: no damage. 4: damage is there, or is left in spite of --repair: what the device could
not read, and what the start of a check of directories found in them. 5: --repair found damage and
quarantined all of it. A damaged page is never served either way: every load verifies,
and a mismatch is a miss.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "namespace", nargs="?", metavar="NAMESPACE", help="Only this one. Default: all."
    )
    parser.add_argument("--repair", action="store_true", help="Quarantine what is damaged.")
    parser.add_argument(
        "--nvme-dir", default="", metavar="DIR", help="Of a daemon that does not run: its segments."
    )
    parser.add_argument(
        "--arena-dir", default="", metavar="DIR", help="Of a daemon that does not run: its arena."
    )
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    report = _directories(args) if args.nvme_dir or args.arena_dir else _daemon(args)
    show(report, as_json=args.json, repaired=args.repair)
    if not report.has_damage:
        return Exit.OK
    return Exit.FOUND if report.left else Exit.REPAIRED


def _daemon(args: argparse.Namespace) -> Report:
    with connect_from(args) as client:
        named = args.namespace is not None
        space = find_namespace(client, args.namespace) if named else None
        report = Report(client.status()["core"]["recovery"])
        _follow(report, client.check(space, repair=args.repair))
    return report


def _directories(args: argparse.Namespace) -> Report:
    if args.namespace is not None or args.address or args.socket:
        raise UsageError(
            "--nvme-dir and --arena-dir are for directories without a daemon; leave NAMESPACE, "
            "--address and --socket out",
            code="two_targets",
        )
    from kvwarehouse import core
    from kvwarehouse.daemon.inspection import Inspection
    from kvwarehouse.daemon.logs import Log

    with Inspection(args.nvme_dir, args.arena_dir, Log("text"), core) as inspection:
        report = Report(inspection.recovery, inspection.findings)
        _follow(report, inspection.check(repair=args.repair))
    return report


def _follow(report: Report, parts: Iterator[CheckProgress]) -> None:
    columns = (TextColumn("checking: {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("0 pages", total=None)
        for part in parts:
            report.add(part)
            size = format_size(part.size_bytes)
            shown = f"{part.checked:,} copies of pages, {size}, {part.damaged:,} bad"
            progress.update(task, description=shown)
