"""`kvwarehouse keep`: prompts whose pages stay."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Final

from kvwarehouse.cli.connection import add_connection, connect_from, find_namespace, refuse_empty
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json, print_table
from kvwarehouse.cli.prompt_file import prompt_from
from kvwarehouse.client import Client
from kvwarehouse.client.keeps import Keep
from kvwarehouse.durations import format_duration, parse_duration
from kvwarehouse.errors import UsageError
from kvwarehouse.sizes import format_size

EXAMPLES = """\
  kvwarehouse keep add system.json my-model --ttl 7d --renewed --as system-prompt
  kvwarehouse keep add hashes.txt 3f2c --keys --ttl 20m       by the engine's block hashes
  kvwarehouse keep list                                       what is kept, and until when
  kvwarehouse keep remove system-prompt
  kvwarehouse keep remove --all
  kvwarehouse keep remove my-model --all                      those of one namespace

add     has what is stored of a prompt stay in DRAM and NVMe for --ttl, whatever is asked for
        meanwhile; what is stored of it later is not kept. With --renewed each use of its last page
        begins the time anew: a system prompt stays for as long as it is in use.
list    shows what is kept, until when, and how much of the bound that takes.
remove  ends a keep, or all: its pages are as all others again.

Keeps hold --keep-percent of DRAM at most (serve), what prompts share once; beyond that `add` is
refused. `clear`, `evict` and damage take kept pages all the same. A restart of the daemon keeps
them, once a keep is some seconds old.
"""

_ACTIONS: Final = ("add", "list", "remove")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", metavar="ACTION", choices=_ACTIONS, help="add, list or remove; see below."
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="FILE|NAME",
        help="add: a file with the prompt's token ids, as a JSON list or between spaces or commas;"
        " - reads standard input. remove: the keep's name.",
    )
    parser.add_argument(
        "namespace",
        nargs="?",
        metavar="NAMESPACE",
        help="add: the prompt's, by the beginning of its id (see `kvwarehouse ls`) or its model's"
        " name. remove: in this one alone.",
    )
    parser.add_argument("--ttl", metavar="TIME", help="add: how long it stays: 90s, 20m, 2h, 7d.")
    parser.add_argument(
        "--renewed",
        action="store_true",
        help="add: each use of its last page begins the time anew.",
    )
    parser.add_argument(
        "--as",
        dest="label",
        metavar="NAME",
        help="add: what it is called; a keep of the same name and namespace gives way. Default: a"
        " new name.",
    )
    parser.add_argument(
        "--keys",
        action="store_true",
        help="add: FILE has the engine's block hashes instead, in hex, one a page.",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="remove: all keeps, or, as `remove NAMESPACE --all`, those of one namespace.",
    )
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    _refuse_what_does_not_fit(args)
    with connect_from(args) as client:
        return {"add": _add, "list": _list, "remove": _remove}[args.action](client, args)


def _refuse_what_does_not_fit(args: argparse.Namespace) -> None:
    only = {
        "--ttl": ("add", args.ttl is not None),
        "--renewed": ("add", args.renewed),
        "--as": ("add", args.label is not None),
        "--keys": ("add", args.keys),
        "--all": ("remove", args.all),
    }
    for flag, (action, given) in only.items():
        if given and args.action != action:
            raise _bad(f"{flag} is for `kvwarehouse keep {action}`; leave it out")
    refuse_empty("--as", args.label, without="a new name", code="bad_keep")
    if args.action == "add" and None in (args.prompt, args.namespace, args.ttl):
        raise _bad("say what to keep: kvwarehouse keep add FILE NAMESPACE --ttl TIME")
    if args.action == "list" and args.prompt is not None:
        raise _bad("`kvwarehouse keep list` lists all keeps; leave the rest out")
    if args.action == "remove" and not args.all and args.prompt is None:
        raise _bad("say which: kvwarehouse keep remove NAME, or --all")
    if args.all and args.namespace is not None:
        raise _bad("with --all say a NAMESPACE at most, and no name of a keep")
    if args.action == "remove":
        refuse_empty("NAME", args.prompt, without="--all", code="bad_keep")


def _add(client: Client, args: argparse.Namespace) -> int:
    ttl_s = parse_duration(args.ttl, name="--ttl")
    prompt = prompt_from(args)
    space = find_namespace(client, args.namespace)
    kept = client.keep(
        space,
        prompt.tokens,
        keys=prompt.keys,
        ttl_s=ttl_s,
        name=args.label or "",
        renewed=args.renewed,
    )
    whole = _pages(prompt.tokens, prompt.keys, int(space.fields["page_tokens"]))
    if args.json:
        print_json({**asdict(kept), "prompt_pages": whole})
    elif kept.pages:
        rest = "" if kept.pages == whole else f" of the prompt's {whole:,}; the rest is not stored"
        print(
            f"kept as {kept.name}: {kept.pages:,} pages ({format_size(kept.bytes)}){rest}, for"
            f" {format_duration(ttl_s)}{' after each use' if kept.renewed else ''}"
        )
    else:
        print("nothing of this prompt is stored, so nothing is kept")
    return Exit.OK if kept.pages else Exit.FOUND


def _list(client: Client, args: argparse.Namespace) -> int:
    listed = client.keeps()
    if args.json:
        print_json(asdict(listed))
        return Exit.OK
    if listed.keeps:
        print_table(
            "",
            ("name", "model", "namespace", ">pages", ">size", ">ends in", "after each use"),
            [_row(each) for each in listed.keeps],
        )
    print(
        f"{len(listed.keeps):,} keeps hold {format_size(listed.bytes)} of"
        f" {format_size(listed.capacity_bytes)}; what several have is counted once"
    )
    return Exit.OK


def _remove(client: Client, args: argparse.Namespace) -> int:
    where = args.prompt if args.all else args.namespace
    space = None if where is None else find_namespace(client, where)
    named = args.prompt
    removed = client.remove_all_keeps(space) if args.all else client.remove_keep(named, space)
    if not removed and not args.all:
        raise _bad(
            f"there is no keep {args.prompt!r}{'' if space is None else ' in that namespace'}; see"
            " `kvwarehouse keep list`"
        )
    if args.json:
        print_json({"removed": removed})
    else:
        print(f"removed {removed:,} {'keep' if removed == 1 else 'keeps'}")
    return Exit.OK


def _row(keep: Keep) -> tuple[object, ...]:
    return (
        keep.name,
        keep.model,
        keep.namespace_id.hex()[:12],
        keep.pages,
        format_size(keep.bytes),
        format_duration(keep.left_s),
        format_duration(keep.ttl_s) if keep.renewed else "",
    )


def _pages(tokens: list[int] | None, keys: list[bytes] | None, page_tokens: int) -> int:
    return len(keys) if keys is not None else len(tokens or ()) // page_tokens


def _bad(problem: str) -> UsageError:
    return UsageError(problem, code="bad_keep")
