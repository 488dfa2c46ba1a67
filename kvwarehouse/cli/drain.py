"""`kvwarehouse drain`: prepares a daemon for its end."""

from __future__ import annotations

import argparse

from kvwarehouse.cli.connection import add_connection, connect_from
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.flush import add_wait, report
from kvwarehouse.cli.output import add_json, print_json

EXAMPLES = """\
  kvwarehouse drain && systemctl restart kvwarehouse
  kvwarehouse drain --undo              it takes stores again

A drained daemon refuses stores until it ends or the drain is undone; loads go on. SIGTERM drains as
well, and ends the daemon.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_wait(parser)
    parser.add_argument(
        "--undo", action="store_true", help="Take a drain back, whoever asked for it."
    )
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    with connect_from(args) as client:
        if args.undo:
            return _undone(client.undrain(), as_json=args.json)
        result = client.drain(args.wait)
    return report(result, as_json=args.json)


def _undone(drained: bool, *, as_json: bool) -> int:
    if as_json:
        print_json({"undone": drained})
    else:
        print("it takes stores again" if drained else "it did not drain")
    return Exit.OK
