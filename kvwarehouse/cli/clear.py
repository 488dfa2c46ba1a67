"""`kvwarehouse clear`: makes pages that nobody finds again, after asking."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from kvwarehouse.cli.connection import (
    add_connection,
    add_selection,
    connect_from,
    described,
    selected,
)
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json
from kvwarehouse.errors import UsageError

EXAMPLES = """\
  kvwarehouse clear 3f2c                the namespace whose id begins so (see `kvwarehouse ls`)
  kvwarehouse clear --all --yes         everything, without the question
  kvwarehouse clear 3f2c --forget       and the namespace itself, until it is opened again

No restart brings cleared pages back. Nothing is erased: their bytes stay in memory and on disk
until others are written there (docs/operations.md has what erases them). To make room only, use
`kvwarehouse evict`.

Exit status 4: this host is cleared, and its fleet's store did not answer in time, so that other
hosts still serve the old pages ("remote": "owed"). They follow once the store has heard of it.
"""

_REMOTE: Final = {
    "done": ", and of the fleet's hosts and store",
    "owed": "; the fleet's store did not answer, and the other hosts follow when it does",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, what="Clear")
    parser.add_argument(
        "--forget",
        action="store_true",
        help="The namespace too; with --all, each that nobody stores into or watches.",
    )
    parser.add_argument("--yes", action="store_true", help="Do not ask.")
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    with connect_from(args) as client:
        space = selected(client, args)
        what = "all namespaces" if space is None else described(space)
        if not args.yes and not _agreed(f"Remove all pages of {what} at {client.address}?"):
            print("nothing was cleared", file=sys.stderr)
            return Exit.FAILED
        pages = client.clear(space, all=space is None, forget=args.forget)
    if args.json:
        print_json({"cleared": pages, **({"remote": pages.remote} if pages.remote else {})})
    else:
        print(f"cleared {pages:,} pages of {what}{_REMOTE.get(pages.remote, '')}")
    return Exit.FOUND if pages.remote == "owed" else Exit.OK


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError(
            "clear asks before it removes pages, and nobody is there to answer; add --yes",
            code="not_confirmed",
        )
    # On stderr, where it is seen though the answer goes to a file. The end of input is a no.
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")
