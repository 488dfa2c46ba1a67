"""`kvwarehouse evict`: makes room, coldest pages first."""

from __future__ import annotations

import argparse

from kvwarehouse.cli.connection import add_connection, add_selection, connect_from, selected
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json
from kvwarehouse.errors import UsageError

EXAMPLES = """\
  kvwarehouse evict --all --pages 1000                 the coldest thousand pages out of DRAM
  kvwarehouse evict my-model --pages 50 --tier nvme    of one namespace, out of NVMe

Pages that are on NVMe too can be promoted again after an eviction from DRAM. Pages that left all
tiers or NVMe stay away over restarts, the last hundred thousand of them. For more than that, use
kvwarehouse clear.
"""

_MOST_PAGES = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, what="The coldest of")
    parser.add_argument(
        "--pages", type=int, required=True, metavar="N", help=f"How many, 1 to {_MOST_PAGES:,}."
    )
    parser.add_argument(
        "--tier",
        choices=("hbm", "dram", "nvme", "all"),
        default="dram",
        help="Which tier they leave (default: dram). Of hbm, copies leave and the pages stay.",
    )
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.pages <= _MOST_PAGES:
        raise UsageError(
            f"--pages {args.pages} is out of range; use 1 to {_MOST_PAGES:,}", code="bad_pages"
        )
    with connect_from(args) as client:
        pages = client.evict(selected(client, args), args.pages, args.tier)
    if args.json:
        print_json({"evicted": pages})
    else:
        print(f"evicted {pages:,} pages from {args.tier}")
    return Exit.OK
