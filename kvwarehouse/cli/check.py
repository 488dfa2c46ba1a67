"""`kvwarehouse check`: verifies stored pages, of a daemon or of directories without one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.progress import Progress, TextColumn, TimeElapsedColumn

from kvwarehouse.cli.commands import daemon_extra
from kvwarehouse.cli.connection import (
    add_connection,
    connect_from,
    find_namespace,
    is_chosen,
    refuse_empty,
)
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, console, print_json, print_table
from kvwarehouse.errors import UsageError, WarehouseError
from kvwarehouse.sizes import format_size
from kvwarehouse.types import BadCopy, CheckProgress

_MOST_KEPT: Final = 10_000

# Fields of RecoveryStatus that say what the start could not believe.
_AT_START: Final = {
    "bad_headers": "segments without a header that can be believed",
    "unreadable_segments": "segments that the device could not read",
    "refused_records": "records refused in segments that had to be scanned",
    "dropped_slots": "pages in DRAM with a damaged header",
    "foreign_segments": "segments of another warehouse",
}
_NO_DAMAGE: Final = {"foreign_segments"}

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

A check that ends before its last page, as with its daemon, prints what it has found until then, and
its exit status is that of what ended it, with damage or without. With --json "done" is false then.
"""


class CheckReport:
    def __init__(
        self,
        recovery: Mapping[str, Any],
        findings: Sequence[tuple[str, Mapping[str, str]]] | None = None,
    ) -> None:
        """recovery: what the start found. findings: what it said then about single segments, where
        that start was this check's own: then it counts as damage."""
        self.at_start = {name: int(recovery.get(name, 0)) for name in _AT_START}
        self.findings = findings
        self.last = CheckProgress()
        self.bad: list[BadCopy] = []
        self.ended_by: WarehouseError | None = None
        """What ended it before its last page."""
        self._unread = 0  # io_error: the next start looks again, whatever was dropped

    def add(self, part: CheckProgress) -> None:
        self.last = part
        self._unread += sum(bad.reason == "io_error" for bad in part.bad)
        self.bad += part.bad[: _MOST_KEPT - len(self.bad)]

    @property
    def has_damage(self) -> bool:
        return self.last.damaged + self._own_start > 0

    @property
    def left(self) -> int:
        """What is damaged and stays so: what was not quarantined, and what no check mends."""
        there = self.last.damaged - self.last.quarantined + self._own_start
        return there + (self._unread if self.last.quarantined else 0)

    @property
    def _own_start(self) -> int:
        own = self.at_start if self.findings is not None else {}
        return sum(count for name, count in own.items() if name not in _NO_DAMAGE)


def show(report: CheckReport, *, as_json: bool, repaired: bool) -> None:
    if as_json:
        print_json(_plain(report))
    else:
        _print_report(report, repaired=repaired)


def _plain(report: CheckReport) -> dict[str, Any]:
    last = report.last
    tiers = {
        tier.tier: {
            "pages": tier.pages,
            "size_bytes": tier.size_bytes,
            "damaged": tier.damaged,
            "dropped": tier.dropped,
            "dropped_bytes": tier.dropped_bytes,
        }
        for tier in last.tiers
    }
    findings = report.findings or ()
    return {
        "checked": last.checked,
        "size_bytes": last.size_bytes,
        "quarantined": last.quarantined,
        "damaged": last.damaged,
        "left": report.left,
        "done": last.done,
        "tiers": tiers,
        "bad": [{"key": bad.key, "tier": bad.tier, "reason": bad.reason} for bad in report.bad],
        "at_start": report.at_start,
        "findings": [{"finding": name, **fields} for name, fields in findings],
    }


def _print_report(report: CheckReport, *, repaired: bool) -> None:
    if report.bad:
        rows = [(bad.key, bad.tier, bad.reason) for bad in report.bad]
        print_table("", ("damaged page", "tier", "reason"), rows)
    for name, fields in report.findings or ():
        print(f"{name} {' '.join(f'{key}={text}' for key, text in fields.items())}")
    for tier in report.last.tiers:
        dropped = f"{tier.dropped:,} quarantined ({format_size(tier.dropped_bytes)})"
        print(
            f"{tier.tier}: checked {tier.pages:,} pages ({format_size(tier.size_bytes)}):"
            f" {tier.damaged:,} damaged, {dropped}"
        )
    when = "found" if report.findings is not None else "found when the daemon started"
    for name, count in report.at_start.items():
        if count:
            print(f"{when}: {count:,} {_AT_START[name]}")
    if report.last.damaged and not repaired:
        print("run it with --repair to quarantine them; loads treat them as misses already")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "namespace", nargs="?", metavar="NAMESPACE", help="Only this one. Default: all."
    )
    parser.add_argument("--repair", action="store_true", help="Quarantine what is damaged.")
    parser.add_argument(
        "--nvme-dir", metavar="DIR", help="Of a daemon that does not run: its segments."
    )
    parser.add_argument(
        "--arena-dir", metavar="DIR", help="Of a daemon that does not run: its arena."
    )
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    report = _directories(args) if _names_directories(args) else _daemon(args)
    show(report, as_json=args.json, repaired=args.repair)
    if report.ended_by is not None:
        raise _ended_early(report, report.ended_by)
    if not report.has_damage:
        return Exit.OK
    return Exit.FOUND if report.left else Exit.REPAIRED


def _names_directories(args: argparse.Namespace) -> bool:
    for flag, given in (("--nvme-dir", args.nvme_dir), ("--arena-dir", args.arena_dir)):
        refuse_empty(flag, given, without="the other directory or the daemon", code="bad_directory")
    return args.nvme_dir is not None or args.arena_dir is not None


def _daemon(args: argparse.Namespace) -> CheckReport:
    with connect_from(args) as client:
        named = args.namespace is not None
        space = find_namespace(client, args.namespace) if named else None
        report = CheckReport(client.status()["core"]["recovery"])
        _follow(report, client.check(space, repair=args.repair))
    return report


def _directories(args: argparse.Namespace) -> CheckReport:
    if args.namespace is not None or is_chosen(args):
        raise UsageError(
            "--nvme-dir and --arena-dir are for directories without a daemon; leave NAMESPACE, "
            "--address, --socket and --name out",
            code="two_targets",
        )
    from kvwarehouse import core

    with daemon_extra("check of directories"):
        from kvwarehouse.daemon.inspection import Inspection
        from kvwarehouse.daemon.logs import Log

    places = (args.nvme_dir or "", args.arena_dir or "")
    with Inspection(*places, Log("text"), core) as inspection:
        report = CheckReport(inspection.recovery, inspection.findings)
        _follow(report, inspection.check(repair=args.repair))
    return report


def _follow(report: CheckReport, parts: Iterator[CheckProgress]) -> None:
    """Until the last page, or what ends it before: hours of reading are not thrown away, and a
    repair has quarantined by then."""
    try:
        _show_progress(report, parts)
    except WarehouseError as error:
        if not report.last.checked:
            raise
        report.ended_by = error


def _ended_early(report: CheckReport, error: WarehouseError) -> WarehouseError:
    last = report.last
    return type(error)(
        f"the check ended early, after {last.checked:,} copies of pages, {last.damaged:,} damaged:"
        f" {error.message}",
        code=error.code,
        context=error.context,
    )


def _show_progress(report: CheckReport, parts: Iterator[CheckProgress]) -> None:
    columns = (TextColumn("checking: {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("0 pages", total=None)
        for part in parts:
            report.add(part)
            size = format_size(part.size_bytes)
            shown = f"{part.checked:,} copies of pages, {size}, {part.damaged:,} bad"
            progress.update(task, description=shown)
