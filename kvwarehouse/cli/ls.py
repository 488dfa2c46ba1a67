"""`kvwarehouse ls`: what a warehouse keeps."""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import islice
from typing import Any

from kvwarehouse.cli.connection import add_connection, connect_from, find_namespace
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json, print_table
from kvwarehouse.client import Client
from kvwarehouse.client.admin import StoredPage
from kvwarehouse.errors import UsageError
from kvwarehouse.sizes import format_size

EXAMPLES = """\
  kvwarehouse ls                        the namespaces, with pages and bytes in each tier; "apart
                                        by": in what those of a model differ
  kvwarehouse ls 3f2c                   the pages of the namespace whose id begins so
  kvwarehouse ls my-model --limit 20 --json

Of a salt a digest is shown, here and with --json. Commands name a salted namespace by its id.
"""

_LIMIT = 100
_MOST_PAGES = 1 << 30  # as many as an index has room for
_SHOWN = 40  # characters of a name
_TIERS = ("dram", "nvme")
APART_BY = (
    "weights", "adapter", "salt", "cache_group", "attention_backend", "hash_scheme", "extra",
)  # fmt: skip
"""Fields that have no column of their own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "namespace",
        nargs="?",
        metavar="NAMESPACE",
        help="List the pages of this one: the beginning of its id, or its model's name.",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=_LIMIT,
        metavar="N",
        help=f"At most N pages (default: {_LIMIT}).",
    )
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.limit <= _MOST_PAGES:
        raise UsageError(
            f"--limit {args.limit} cannot be; use 1 to {_MOST_PAGES:,}", code="bad_limit"
        )
    with connect_from(args) as client:
        if args.namespace is None:
            _namespaces(client, args.json)
        else:
            _pages(client, args)
    return Exit.OK


def _namespaces(client: Client, as_json: bool) -> None:
    pages = {each["id"]: each for each in client.status()["core"]["namespaces"]}
    found: list[dict[str, Any]] = []
    for each in client.namespaces():
        counts = pages.get(each.id.hex(), {})
        page_bytes = each.fields["page_bytes"] * each.fields["shards"]
        tiers = {tier: counts.get(f"{tier}_pages", 0) for tier in _TIERS}
        found.append(
            {
                "id": each.id.hex(),
                **each.fields,
                **{f"{tier}_pages": held for tier, held in tiers.items()},
                **{f"{tier}_bytes": held * page_bytes for tier, held in tiers.items()},
                "created_at_ns": each.created_at_ns,
            }
        )
    if as_json:
        print_json({"namespaces": found})
        return
    apart = _apart(found)
    counts = (">tokens", ">page", ">shards", ">dram", ">nvme")
    print_table(
        "",
        ("namespace", "model", "dtype", "layout", *counts, "apart by"),
        [
            (
                each["id"][:12],
                _short(each["model"]),
                each["kv_dtype"] or each["dtype"],
                each["layout"],
                each["page_tokens"],
                format_size(each["page_bytes"] * each["shards"]),
                each["shards"],
                *(
                    f"{each[f'{tier}_pages']:,} ({format_size(each[f'{tier}_bytes'])})"
                    for tier in _TIERS
                ),
                " ".join(
                    f"{name}={_short(str(each[name]))}"
                    for name in APART_BY
                    if len(apart[each["model"], name]) > 1
                ),
            )
            for each in found
        ],
    )


def _apart(found: list[dict[str, Any]]) -> dict[tuple[str, str], set[str]]:
    """The values of each field that has no column of its own, by model: several tell namespaces
    apart that would look alike."""
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for each in found:
        for name in APART_BY:
            values[each["model"], name].add(str(each[name]))
    return values


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _pages(client: Client, args: argparse.Namespace) -> None:
    space = find_namespace(client, args.namespace)
    # One more than is shown says whether there are more.
    pages = list(islice(client.pages(space), args.limit + 1))
    shown, more = pages[: args.limit], len(pages) > args.limit
    if args.json:
        listed = [_fields(page) for page in shown]
        print_json({"namespace": space.id, "pages": listed, "more": more})
        return
    print_table(
        "",
        ("key", ">position", "tiers", ">size", "parent"),
        [
            (
                page.key,
                page.position,
                "+".join(page.tiers),
                format_size(page.size_bytes),
                page.parent,
            )
            for page in shown
        ],
    )
    if more:
        print(f"... and more; use --limit to see them (now {args.limit})")


def _fields(page: StoredPage) -> dict[str, Any]:
    return {
        "id": page.id,
        "key": page.key,
        "parent": page.parent,
        "position": page.position,
        "tiers": list(page.tiers),
        "size_bytes": page.size_bytes,
        "sealed_at_ns": page.sealed_at_ns,
    }
