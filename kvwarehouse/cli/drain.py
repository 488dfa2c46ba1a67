"""`kvwarehouse drain`: prepares a daemon for its end."""

from __future__ import annotations

import argparse

from kvwarehouse.cli.connection import add_connection, connect_from
from kvwarehouse.cli.flush import add_wait, report
from kvwarehouse.cli.output import add_json

EXAMPLES = """\
  kvwarehouse drain && systemctl restart kvwarehouse

A drained daemon refuses stores until it ends; loads go on. SIGTERM drains as well.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_wait(parser)
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    with connect_from(args) as client:
        result = client.drain(args.wait)
    return report(result, as_json=args.json)
