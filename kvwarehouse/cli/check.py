"""`kvwarehouse check`: verifies stored pages against their digests, while the daemon serves."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from rich.progress import Progress, TextColumn, TimeElapsedColumn

from kvwarehouse.cli.connection import add_connection, connect_from
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, console, print_json, print_table
from kvwarehouse.cli.selection import find_namespace
from kvwarehouse.client import Client
from kvwarehouse.sizes import format_size
from kvwarehouse.types import Namespace

EXAMPLES = """\
  kvwarehouse check                     all pages; nothing is changed
  kvwarehouse check my-model --repair   one namespace; damaged pages are quarantined

Exit status 4: damaged pages were found. A damaged page is never served either way: every load
verifies, and a mismatch is a miss.
"""

_MOST_KEPT = 10_000


@dataclass
class Report:
    checked: int = 0
    size_bytes: int = 0
    quarantined: int = 0
    damaged: int = 0
    bad: list[tuple[bytes, str]] = field(default_factory=list)
    """(key, reason), at most 10,000 of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "namespace", nargs="?", metavar="NAMESPACE", help="Only this one. Default: all."
    )
    parser.add_argument("--repair", action="store_true", help="Quarantine what is damaged.")
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    with connect_from(args) as client:
        space = find_namespace(client, args.namespace).space if args.namespace else None
        report = _check(client, space, repair=args.repair)
    if args.json:
        _print_json(report)
    else:
        _print(report, repaired=args.repair)
    return Exit.FOUND if report.damaged else Exit.OK


def _check(client: Client, space: Namespace | None, *, repair: bool) -> Report:
    report = Report()
    columns = (TextColumn("checking: {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("0 pages", total=None)
        for part in client.check(space, repair=repair):
            report.checked, report.size_bytes = part.checked, part.size_bytes
            report.quarantined = part.quarantined
            report.damaged += len(part.bad)
            report.bad += part.bad[: _MOST_KEPT - len(report.bad)]
            shown = f"{part.checked:,} pages, {format_size(part.size_bytes)}, {report.damaged} bad"
            progress.update(task, description=shown)
    return report


def _print_json(report: Report) -> None:
    print_json(
        {
            "checked": report.checked,
            "size_bytes": report.size_bytes,
            "quarantined": report.quarantined,
            "damaged": report.damaged,
            "bad": [{"key": key, "reason": reason} for key, reason in report.bad],
        }
    )


def _print(report: Report, *, repaired: bool) -> None:
    if report.bad:
        print_table("", ("damaged page", "reason"), report.bad)
    print(
        f"checked {report.checked:,} pages ({format_size(report.size_bytes)}):"
        f" {report.damaged:,} damaged, {report.quarantined:,} quarantined"
    )
    if report.damaged and not repaired:
        print("run it with --repair to quarantine them; loads treat them as misses already")
