"""How the planning commands print_report a report: tables, --json, --html."""

from __future__ import annotations

import argparse

from kvwarehouse.cli.output import add_json, console, print_json, print_table
from kvwarehouse.report.html import write_page
from kvwarehouse.report.report import Report


def add_report_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html", metavar="FILE", help="Also write one self-contained HTML page with plots."
    )
    add_json(parser)


def print_report(report: Report, args: argparse.Namespace) -> None:
    """Raises UsageError where the page cannot be written; then nothing is printed."""
    if args.html is not None:
        write_page(report, args.html)
    if args.json:
        print_json(dict(report.figures))
        return
    shown = console()
    shown.print(f"{report.title}\n{report.summary}", markup=False, highlight=False)
    for block in report.tables:
        print()
        print_table(block.title, block.columns, block.rows)
        if block.note:
            shown.print(block.note, style="dim", markup=False, highlight=False)
    if report.notes:
        print()
        for note in report.notes:
            shown.print(f"- {note}", style="dim", markup=False, highlight=False)
