"""`kvwarehouse drive`: a trace or a workload against a real engine, or the daemon itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import add_progress, add_report_output, print_report, progress_from
from kvwarehouse.cli.pace_flags import add_pace_flags, bounds_from, describe_pace
from kvwarehouse.cli.trace_flags import add_trace_flags, trace_from
from kvwarehouse.cli.workload_flags import (
    add_workload_flags,
    refuse_workload_flags,
    workload_from,
    workloads_listed,
)
from kvwarehouse.client import connect
from kvwarehouse.durations import format_duration
from kvwarehouse.errors import UsageError
from kvwarehouse.loadgen.completions import Completions
from kvwarehouse.loadgen.drive import Drive, DriveBounds, calls_of
from kvwarehouse.loadgen.endpoint import endpoint_of
from kvwarehouse.loadgen.prompts import PromptShape
from kvwarehouse.loadgen.report import DriveFacts, answers_report, pages_report
from kvwarehouse.loadgen.warehouse import WarehouseEngine
from kvwarehouse.report.report import Report
from kvwarehouse.sizes import parse_size
from kvwarehouse.workloads.call import WorkloadCall
from kvwarehouse.workloads.catalogue import KINDS

EXAMPLES = """\
  kvwarehouse drive trace.jsonl --engine http://127.0.0.1:8000 --model NAME
  kvwarehouse drive chat --engine http://127.0.0.1:8000 --model NAME --duration 2h --speed 0.5
  kvwarehouse drive document-qa --engine http://gpu-7:8000 --model NAME --concurrency 3
  kvwarehouse drive chat --engine unix:///run/user/1000/kvwarehouse/default.sock \\
      --page-bytes 2MiB --concurrency 4 --requests 1000 --html drive.html
  kvwarehouse drive trace.jsonl --engine http://127.0.0.1:8000 --model tiny --shrink 16

An engine is asked by /v1/completions with token ids, streamed. A daemon is asked as an engine
would: lookup, load, store, with pages of noise. A file that has a workload's name is given as
./NAME. Ctrl-C ends the drive and prints what there is. docs/sizing.md explains the figures.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="TRACE",
        help=f"A trace file, a folder of sessions, or a workload. {workloads_listed()}.",
    )
    parser.add_argument(
        "--engine",
        required=True,
        metavar="URL",
        help="http://host:port or https://host of an OpenAI-compatible server, or unix:///path of a"
        " daemon.",
    )
    add_pace_flags(parser)
    _add_prompts(parser)
    _add_engine(parser)
    add_trace_flags(parser)
    add_workload_flags(parser)
    add_progress(parser)
    add_report_output(parser)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the prompts")
    group.add_argument(
        "--shrink",
        type=int,
        default=1,
        metavar="N",
        help="Divide all lengths, those of blocks too: for small models (default: 1).",
    )
    group.add_argument("--most-prompt-tokens", type=int, metavar="N", help="Longer ones are cut.")
    group.add_argument("--most-output-tokens", type=int, metavar="N", help="Of an answer.")
    group.add_argument(
        "--token-ids",
        default="1000:30000",
        metavar="FROM:TO",
        help="Prompts are made of ids FROM up to before TO (default: 1000:30000).",
    )
    group.add_argument(
        "--token-seed",
        type=int,
        default=0,
        metavar="N",
        help="Another seed makes prompts that share nothing with those of earlier drives"
        " (default: 0).",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the engine")
    group.add_argument("--model", metavar="NAME", help="As the server names it; for http only.")
    group.add_argument(
        "--api-key-file", metavar="FILE", help="With the key that the server wants; for http only."
    )
    group.add_argument(
        "--page-bytes", metavar="SIZE", help="Of a block's KV; for a daemon only (default: 1MiB)."
    )


def run(args: argparse.Namespace) -> int:
    daemon = args.engine.startswith("unix:")
    _check(args, daemon)
    bounds = bounds_from(args)
    requests, block_tokens = _requests(args, bounds)
    first, end = _token_ids(args.token_ids)
    shape = PromptShape(
        block_tokens,
        args.shrink,
        args.most_prompt_tokens,
        args.most_output_tokens,
        first,
        end,
        args.token_seed,
    )
    drive_one = _drive_daemon if daemon else _drive_server
    drive, report, good = drive_one(args, shape, requests, bounds)
    print_report(report, args)
    if drive.interrupted:
        return Exit.INTERRUPTED
    return Exit.OK if good else Exit.FOUND


def _drive_server(
    args: argparse.Namespace,
    shape: PromptShape,
    requests: Iterator[WorkloadCall],
    bounds: DriveBounds,
) -> tuple[Drive, Report, bool]:
    endpoint = endpoint_of(args.engine, _key(args.api_key_file))
    endpoint.check()
    engine = Completions(endpoint, args.model, shape)
    drive = Drive(engine, requests, bounds)
    _run(
        args,
        drive,
        lambda: f"{engine.answers.answered:,} answered, {engine.answers.failed:,} failed",
    )
    engine.close()
    left_out = [f"The server takes no {name}: it was left out." for name in engine.left_out]
    report = answers_report(engine.answers, drive, _facts(args, bounds, left_out))
    return drive, report, not engine.answers.failed


def _drive_daemon(
    args: argparse.Namespace,
    shape: PromptShape,
    requests: Iterator[WorkloadCall],
    bounds: DriveBounds,
) -> tuple[Drive, Report, bool]:
    page_bytes = parse_size(args.page_bytes or "1MiB", name="--page-bytes")
    with connect(args.engine) as client:
        engine = WarehouseEngine(client, shape, page_bytes)
        drive = Drive(engine, requests, bounds)
        _run(args, drive, lambda: f"{engine.pages.served:,} served, {engine.pages.failed:,} failed")
    report = pages_report(engine.pages, drive, _facts(args, bounds, []))
    return drive, report, not (engine.pages.failed or engine.pages.counts["wrong"])


def _run(args: argparse.Namespace, drive: Drive, counts: Callable[[], str]) -> None:
    progress = progress_from(args)
    drive.run(
        lambda: progress.tell(
            lambda: f"{format_duration(drive.running_s)}: {counts()}, {drive.under_way:,} under way"
        )
    )


def _check(args: argparse.Namespace, daemon: bool) -> None:
    if daemon:
        wrong = [name for name in ("model", "api_key_file") if getattr(args, name) is not None]
        where = "a daemon"
    else:
        wrong = [] if args.page_bytes is None else ["page_bytes"]
        where = "a server"
        if args.model is None:
            raise UsageError(
                "--model is missing; give the name that the server lists under /v1/models",
                code="missing_flag",
            )
    if wrong:
        flag = f"--{wrong[0].replace('_', '-')}"
        raise UsageError(f"{flag} is not for {where} ({args.engine})", code="bad_engine")
    for name in ("most_prompt_tokens", "most_output_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {value} cannot be; use 1 or more", code="bad_bounds")
    if not 0 <= args.token_seed < 2**63:
        raise UsageError(f"--token-seed {args.token_seed} cannot be; use 0 to 2^63 - 1")


def _requests(args: argparse.Namespace, bounds: DriveBounds) -> tuple[Iterator[WorkloadCall], int]:
    """And the tokens of a block."""
    if args.source in KINDS:
        made = workload_from(args.source, args)
        bounded = bounds.requests is not None or bounds.duration_s is not None
        if made.kind.endless and not bounded:
            raise UsageError(
                f"{made.name} has no end; give --requests or --duration", code="bad_bounds"
            )
        if args.again:
            raise UsageError("--again is for traces; a workload goes on by itself")
        return made.workload.calls(), made.workload.block_tokens
    if not Path(args.source).exists():
        raise UsageError(
            f"there is no trace {args.source}, and no workload of that name; workloads:"
            f" {', '.join(KINDS)}",
            code="no_trace",
        )
    refuse_workload_flags(args, f"{args.source} is a trace")
    if args.again and bounds.requests is None and bounds.duration_s is None:
        raise UsageError("--again has no end; give --requests or --duration", code="bad_bounds")
    trace = trace_from(args.source, args)
    return calls_of(trace, again=args.again), trace.block_tokens


def _token_ids(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal()):
        raise UsageError(f"--token-ids {text} is no range; write such as 1000:30000")
    return int(first), int(end)


def _key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        words = Path(path).read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--api-key-file {path} cannot be read: {error}", code="bad_key"
        ) from error
    if len(words) != 1:
        raise UsageError(
            f"--api-key-file {path} must hold one key and nothing else", code="bad_key"
        )
    return words[0]


def _facts(args: argparse.Namespace, bounds: DriveBounds, notes: list[str]) -> DriveFacts:
    if args.shrink > 1:
        notes = [*notes, f"All lengths are divided by {args.shrink}."]
    return DriveFacts(args.engine, args.source, describe_pace(bounds), notes)
