"""`kvwarehouse flush`: waits until what is stored is durable."""

from __future__ import annotations

import argparse
import dataclasses

from kvwarehouse.cli.connection import add_connection, connect_from
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json
from kvwarehouse.types import FlushResult

EXAMPLES = """\
  kvwarehouse flush
  kvwarehouse flush --wait 120 || echo "not all is durable yet"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_wait(parser)
    add_connection(parser)
    add_json(parser)


def add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="How long the flush may take (default: 30; a daemon ends each after 600).",
    )


def run(args: argparse.Namespace) -> int:
    with connect_from(args) as client:
        result = client.flush(args.wait)
    return report(result, as_json=args.json)


def report(result: FlushResult, *, as_json: bool) -> int:
    """Prints it; the exit status says whether pages are pending."""
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        print(
            f"{result.flushed:,} pages durable, {result.pending:,} pending,"
            f" {result.not_admitted:,} in DRAM only"
        )
    return Exit.FOUND if result.pending else Exit.OK
