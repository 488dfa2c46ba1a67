"""`kvwarehouse why`: why the pages of a prompt are found or not."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from kvwarehouse.cli.connection import (
    add_connection,
    connect_from,
    described,
    find_namespace,
    refuse_empty,
)
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_json, print_json, print_table
from kvwarehouse.cli.prompt_file import PromptFile, add_prompt, prompt_from
from kvwarehouse.client import Client
from kvwarehouse.client.admin import StoredNamespace
from kvwarehouse.client.why import Branches, NotedRequest, PromptWhy, WhyAnswer, WhyRun
from kvwarehouse.durations import format_duration
from kvwarehouse.errors import UsageError
from kvwarehouse.types import CHAIN_SCHEME

EXAMPLES = """\
  kvwarehouse why --request chatcmpl-8f3a      a request of vLLM, by the id in its log
  kvwarehouse why --recent                     what became of the newest requests, a line each
  kvwarehouse why prompt.json                  a prompt, in each namespace that could have it
  kvwarehouse why prompt.json 3f2c             in the one whose id begins so
  kvwarehouse why hashes.txt --keys my-model   by the engine's block hashes: vLLM, SGLang, LMCache
  tokenize < prompt.txt | kvwarehouse why - --json

Of a request: what the engine had, what was found and loaded, and why the next page was missing when
it was looked up. The newest 4,096 requests are kept.

Of a prompt, for each page: the tier that has it; or when it left, and why; or that it was not
stored, and why. Where the prompt goes on differently from what is stored: from which token on.
Where another namespace has more of it: in what that differs. Nothing of this counts as a lookup,
or as a use of a page.

Why pages left is kept in memory, of each page the last time, and within a bound: where it may be
forgotten, the answer says since when it would be known. A restart of the daemon forgets all of it.
docs/troubleshooting.md says what to do.
"""

_RECENT: Final = 20

_LEFT: Final[Mapping[str, str]] = {
    "evicted": "evicted from DRAM, to make room",
    "window": "the index had no room for it (serve --index-pages)",
    "rebalanced": "its memory went to pages of another size",
    "reclaimed": "its part of NVMe was used again",
    "cleared": "the namespace was cleared",
    "operator": "taken out by `kvwarehouse evict`",
    "orphaned": "a page before it had left, so that nobody could find it",
    "quarantined": "its bytes were not those that were stored",
    "lost": "NVMe had it, and a flush failed",
    "write_budget": "evicted from DRAM; the budget for writes had kept it from NVMe"
    " (serve --nvme-writes-per-day)",
}
_REFUSED: Final[Mapping[str, str]] = {
    "draining": "the daemon was draining",
    "parent_missing": "the page before it was not stored",
    "reserve_limit": "too much was being stored at a time",
    "later": "room was still being made",
    "no_room": "DRAM was full of pages in use",
    "index_full": "the index was full of pages in use (serve --index-pages)",
    "stale": "whoever stored it ended, gave up or took too long",
    "cleared": "the namespace was cleared meanwhile",
    "mismatch": "what was said of it fits neither its namespace nor other stores of it",
}
_THERE: Final[Mapping[str, str]] = {
    "hbm": "in HBM",
    "dram": "in DRAM",
    "nvme": "on NVMe",
    "storing": "being stored now",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser, optional=True)
    parser.add_argument(
        "namespace",
        nargs="?",
        metavar="NAMESPACE",
        help="The beginning of its id (see `kvwarehouse ls`), or its model's name: each of that"
        " model. Default: all but those with a salt. One with a salt is named by its id.",
    )
    parser.add_argument(
        "--show-tokens",
        action="store_true",
        help="Also the token ids of the page that is stored where the prompt goes on differently:"
        " part of what another user wrote.",
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--request",
        metavar="ID",
        help="Of this request of an engine instead, by its id or how that begins. The connectors of"
        " vLLM and TensorRT-LLM say what they found for each.",
    )
    asked.add_argument(
        "--recent",
        nargs="?",
        type=int,
        const=_RECENT,
        metavar="N",
        help=f"The newest N requests instead (default: {_RECENT}).",
    )
    add_connection(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    of_requests = args.request is not None or args.recent is not None
    if of_requests == (args.prompt is not None):
        raise UsageError(
            "say what is asked about: a FILE with a prompt, or --request, or --recent",
            code="no_target",
        )
    return _of_requests(args) if of_requests else _of_prompt(args)


def _of_requests(args: argparse.Namespace) -> int:
    refuse_empty("--request", args.request, without="those of --recent", code="bad_request")
    with connect_from(args) as client:
        if args.request is None:
            noted = client.requests(limit=args.recent)
        else:
            noted = client.requests(args.request)
        began_s = time.time() - client.status()["core"]["uptime_s"]
    if args.json:
        print_json({"requests": [asdict(each) for each in noted]})
    elif args.request is None or len(noted) > 1:
        _list(noted)
    elif noted:
        _show_request(noted[0], began_s)
    if args.request is not None and not noted:
        raise UsageError(
            f"request {args.request!r} is not known here: the connectors of vLLM and TensorRT-LLM"
            " say what they found for theirs, within a second, and the newest 4,096 are kept;"
            " `kvwarehouse why --recent` lists them",
            code="unknown_request",
        )
    return Exit.OK


def _of_prompt(args: argparse.Namespace) -> int:
    prompt = prompt_from(args)
    with connect_from(args) as client:
        answer = _asked(client, prompt, args)
        elsewhere = _elsewhere(client, prompt, answer) if args.namespace is not None else []
        began_s = time.time() - client.status()["core"]["uptime_s"]
        known = [] if answer.namespaces else client.namespaces()
    if args.json:
        fields = {**asdict(answer), "elsewhere": [asdict(each) for each in elsewhere]}
        print_json(_plain(fields))
        return Exit.OK
    if not answer.namespaces:
        print(_nothing_to_ask(known, args.namespace or "", by_keys=prompt.keys is not None))
        return Exit.OK
    best, *rest = answer.namespaces
    _show(best, began_s, prompt)
    for each in rest:
        print()
        if each.found or any(run.state in ("left", "refused") for run in each.runs):
            _show(each, began_s, prompt)
            print(f"It differs from the first in {_differs(best.namespace, each.namespace)}.")
        else:
            print(
                f"{described(each.namespace)}: nothing of it. It differs in"
                f" {_differs(best.namespace, each.namespace)}."
            )
    if answer.others:
        print(f"\n{answer.others} more namespaces have no more of it; name one to see it.")
    for each in elsewhere:
        print(
            f"\n{described(each.namespace)} has more of it, {each.found:,} of {each.pages:,}"
            f" pages. It differs in {_differs(best.namespace, each.namespace)}."
        )
    return Exit.OK


def _list(noted: Sequence[NotedRequest]) -> None:
    if not noted:
        print("No engine has said anything of its requests yet.")
        return
    print_table(
        "",
        ("at", "engine", "request", ">tokens", ">in the engine", ">found", ">loaded", "then"),
        [
            (
                _clock(each.note.at_ns),
                _printable(each.note.engine),
                _printable(each.note.request_id),
                each.note.tokens,
                each.note.engine_tokens,
                each.note.found_tokens - each.note.engine_tokens,
                each.note.load_tokens - each.note.engine_tokens,
                _then(each),
            )
            for each in noted
        ],
    )


def _printable(text: str) -> str:
    """What users may have chosen, without what would move a terminal's cursor."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _then(each: NotedRequest) -> str:
    """Why it ended where it did, in a word or two."""
    gaps = [run for part in each.missing for run in part.runs[:1] if not run.there]
    left = next((run for run in gaps if run.reason), None)
    if left is not None:
        return (
            f"{left.state} ({left.reason})"
            if left.state == "left"
            else f"not stored ({left.reason})"
        )
    if any(run.state == "storing" for run in gaps):
        return _THERE["storing"]
    if any(part.branches.pages for part in each.missing):
        return "differs from what is stored"
    return "new" if gaps else ""


def _show_request(each: NotedRequest, began_s: float) -> None:
    note = each.note
    print(f"{_printable(note.request_id)}, {_clock(note.at_ns)}: {note.tokens:,} tokens\n")
    parts = [
        (0, note.engine_tokens, "the engine had them itself"),
        (note.engine_tokens, note.load_tokens, "found; the engine loads them"),
        (note.load_tokens, note.found_tokens, "found; computing them is faster"),
        (note.found_tokens, note.tokens, "computed"),
    ]
    print_table(
        "",
        (">tokens", "what became of them"),
        [(_span(first, end - first), said) for first, end, said in parts if end > first],
    )
    for part in each.missing:
        if not part.runs or part.runs[0].there:
            continue  # another of the model's namespaces ended it
        print(f"\nMissing in {part.namespace_id.hex()[:12]} ({part.model}) at that time:")
        print_table(
            "",
            (">pages", ">tokens", "why"),
            [
                (
                    _span(run.first, run.pages),
                    _span(run.first * part.page_tokens, run.pages * part.page_tokens),
                    _said(run, began_s),
                )
                for run in part.runs
            ],
        )
        if part.branches.pages:
            first = part.runs[0].first * part.page_tokens
            print(
                f"Other prompts went on differently behind the same {first:,} tokens"
                f" ({_count(part.branches)} pages are stored there): it differs from them somewhere"
                f" in the next {part.page_tokens:,}."
            )


def _count(branches: Branches) -> str:
    return f"{branches.pages:,}{' or more' if branches.more else ''}"


def _asked(client: Client, prompt: PromptFile, args: argparse.Namespace) -> WhyAnswer:
    space: StoredNamespace | None = None
    model = ""
    if args.namespace is not None:
        models = {each.fields["model"] for each in client.namespaces()}
        if args.namespace in models:
            model = args.namespace
        else:
            space = find_namespace(client, args.namespace)
    return client.why(
        prompt.tokens, keys=prompt.keys, space=space, model=model, with_tokens=args.show_tokens
    )


def _elsewhere(client: Client, prompt: PromptFile, answer: WhyAnswer) -> list[PromptWhy]:
    """Other namespaces that have more of it than those that were asked for."""
    asked = {each.namespace.id for each in answer.namespaces}
    most = max((each.found * each.page_tokens for each in answer.namespaces), default=0)
    return [
        each
        for each in client.why(prompt.tokens, keys=prompt.keys).namespaces
        if each.namespace.id not in asked and each.found * each.page_tokens > most
    ]


def _nothing_to_ask(known: list[StoredNamespace], model: str, *, by_keys: bool) -> str:
    """Of the namespaces that were meant none could be asked."""
    meant = [each for each in known if model in ("", each.fields["model"])]
    if not meant:
        return "This warehouse has no namespace yet: nothing was stored."
    if any((each.fields["hash_scheme"] != CHAIN_SCHEME) == by_keys for each in meant):
        return "The namespaces that could have it have a salt; name one by its id."
    if by_keys:
        return "The namespaces here name pages by their tokens: give those, without --keys."
    return (
        "The namespaces here name pages by their engine's block hashes: give those, with --keys, or"
        " ask about a request (--recent)."
    )


def _show(each: PromptWhy, began_s: float, prompt: PromptFile) -> None:
    tokens = each.page_tokens
    print(
        f"{described(each.namespace)}: {each.found:,} of {each.pages:,} pages found,"
        f" {each.found * tokens:,} of {each.pages * tokens:,} tokens\n"
    )
    if not each.pages:
        print(f"The prompt has no whole page: one is {tokens:,} tokens.")
        return
    print_table(
        "",
        (">pages", ">tokens", "what became of them"),
        [
            (
                _span(run.first, run.pages),
                _span(run.first * tokens, run.pages * tokens),
                _said(run, began_s),
            )
            for run in each.runs
        ],
    )
    if cut := each.pages - sum(run.pages for run in each.runs):
        print(f"... and {cut:,} pages more, in other runs.")
    if each.remote_pages:
        last = each.found + each.remote_pages - 1
        print(f"The remote store probably has pages {each.found:,} to {last:,}.")
    if each.found < each.pages:
        print(f"\n{_parting(each)}")
        if each.branches.tokens:
            _show_tokens(each, prompt)


def _span(first: int, count: int) -> str:
    return f"{first:,}" if count == 1 else f"{first:,}-{first + count - 1:,}"


def _said(run: WhyRun, began_s: float) -> str:
    if run.state in _THERE:
        return _THERE[run.state]
    if run.state == "unknown":
        if run.remembered_ns:
            return f"never stored, or gone before {_clock(run.remembered_ns)}: not remembered"
        began = _clock(int(began_s * 1e9))
        return f"not stored since the daemon began, {began}"
    when = _clock(run.earliest_at_ns)
    if run.latest_at_ns - run.earliest_at_ns >= 2_000_000_000:
        when += f" to {_clock(run.latest_at_ns)}"
    if run.state == "refused":
        return f"not stored, {when}: {_REFUSED.get(run.reason, run.reason)}"
    said = f"left {when}: {_LEFT.get(run.reason, run.reason)}"
    return "; ".join([said, *_life(run, began_s)])


def _life(run: WhyRun, began_s: float) -> list[str]:
    """Of the first page of the run, how long before it left it was stored and used."""

    def before(at_ns: int) -> str:
        seconds = round((run.first_at_ns - at_ns) / 1e9)
        return format_duration(seconds) if seconds > 0 else "under 1 s"

    said = []
    if run.stored_at_ns:
        said.append(f"stored {before(run.stored_at_ns)} before")
    if run.used_at_ns:
        least = "at least " if run.used_earlier else ""
        said.append(f"last used {least}{before(run.used_at_ns)} before")
    elif run.stored_at_ns / 1e9 > began_s:
        said.append("never used")
    else:
        said.append("not used since the daemon began")
    return said


def _clock(at_ns: int) -> str:
    at = time.localtime(at_ns / 1e9)
    today = time.localtime()
    same_day = (at.tm_year, at.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", at)


def _parting(each: PromptWhy) -> str:
    branches, tokens = each.branches, each.page_tokens
    first = each.found * tokens
    behind = f"behind the same {first:,} tokens" if first else "in this namespace"
    if not branches.pages:
        within = " was found within a second" if branches.more else " is stored"
        return f"Nothing else{within} {behind}."
    count = _count(branches)
    pages = f"{count} other page{'' if branches.pages == 1 else 's'}"
    verb = "is" if branches.pages == 1 else "are"
    what = pages if first else f"{count} prompts that begin otherwise"
    if branches.pages == 1 and not first:
        what = "1 prompt that begins otherwise"
    if not branches.compared:
        return (
            f"{what} {verb} stored {behind}: it differs from them somewhere in tokens {first:,} to"
            f" {first + tokens - 1:,}."
        )
    compared = ""
    if branches.compared < branches.pages:
        compared = f" (of {branches.compared:,} of them, whose tokens are in DRAM)"
    return (
        f"{what} {verb} stored {behind}{compared}. From token"
        f" {first + branches.common_tokens:,} on the prompt differs from the one most like it."
    )


def _show_tokens(each: PromptWhy, prompt: PromptFile) -> None:
    first = each.found * each.page_tokens
    at = each.branches.common_tokens
    print(f"stored there: {' '.join(map(str, each.branches.tokens[at:]))}")
    if prompt.tokens is not None:
        own = prompt.tokens[first + at : first + each.page_tokens]
        print(f"the prompt:   {' '.join(map(str, own))}")


def _differs(one: StoredNamespace, other: StoredNamespace) -> str:
    """In which fields, and how."""
    fields = [
        f"{name} ({_short(value)} here, {_short(other.fields[name])} there)"
        for name, value in one.fields.items()
        if value != other.fields[name]
    ]
    return ", ".join(fields)


def _short(value: Any) -> str:
    text = str(value)
    return repr(text) if not text else text if len(text) <= 24 else f"{text[:21]}..."


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """A listed namespace's fields are no dict, which asdict leaves as they are."""
    for each in (*fields["namespaces"], *fields["elsewhere"]):
        each["namespace"]["fields"] = dict(each["namespace"]["fields"])
    return fields
