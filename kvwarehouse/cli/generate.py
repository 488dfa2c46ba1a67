"""`kvwarehouse generate`: a workload as a trace file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.output import (
    Progress,
    add_json,
    add_progress,
    console,
    print_json,
    print_table,
    progress_from,
)
from kvwarehouse.cli.workload_flags import Made, add_workload_flags, workload_from, workloads_listed
from kvwarehouse.durations import format_duration, parse_duration
from kvwarehouse.errors import UsageError
from kvwarehouse.workloads.agents import Agents, AgentSession
from kvwarehouse.workloads.call import WorkloadCall
from kvwarehouse.workloads.trace_writer import (
    CALL_LINES,
    STDOUT,
    WorkloadBounds,
    bounded,
    bounded_sessions,
    weka,
    write_lines,
)

EXAMPLES = """\
  kvwarehouse generate chat --out chat.jsonl --requests 12031
  kvwarehouse generate chat --out day.jsonl --duration 1d --requests-per-s 20 --seed 7
  kvwarehouse generate agents --variant truncated --out sessions.jsonl --requests 5000
  kvwarehouse generate document-qa --documents 50 --order random --out documents.jsonl
  kvwarehouse generate tiers --tier-blocks 4096 --sets 0.5,1,1.05,2 --out tiers.jsonl

The same seed makes the same bytes. `kvwarehouse replay FILE` says what a cache would hit on it,
`kvwarehouse drive` sends it to an engine. docs/sizing.md says what was fitted to what.
"""

_DEFAULT_REQUESTS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="WORKLOAD", help=f"{workloads_listed()}.")
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="A new file; - for the standard output."
    )
    parser.add_argument(
        "--format",
        choices=("mooncake", "bailian", "weka"),
        help="(default: the one that the workload's source has).",
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"At most so many (default: {_DEFAULT_REQUESTS:,} of a workload without end, unless"
        " --duration says more). WEKA's sessions are whole, the last goes over it.",
    )
    parser.add_argument(
        "--duration", metavar="TIME", help="Of the trace's own clock: 90s, 15m, 2h, 3d."
    )
    add_workload_flags(parser)
    add_progress(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    made = workload_from(args.workload, args)
    form = args.format or made.kind.formats[0]
    if form not in made.kind.formats:
        raise UsageError(
            f"--format {form} is not for {made.name}; use one of {', '.join(made.kind.formats)}",
            code="bad_format",
        )
    if args.json and args.out == STDOUT:
        raise UsageError("--json and the trace cannot both be printed; use --out FILE")
    counted = _Counted(progress_from(args))
    write_lines(args.out, _lines(made, form, _bounds(args, made, form), counted))
    _show(args, made, form, counted)
    return Exit.OK


def _bounds(args: argparse.Namespace, made: Made, form: str) -> WorkloadBounds:
    if args.requests is not None and args.requests < 1:
        raise UsageError(f"--requests {args.requests} cannot be; use 1 or more", code="bad_bounds")
    if args.duration is not None and form == "weka":
        raise UsageError(
            "--duration needs one clock, and WEKA's sessions have one each; use --requests, or"
            " --format mooncake",
            code="bad_bounds",
        )
    duration_s = None
    if args.duration is not None:
        duration_s = parse_duration(args.duration, name="--duration")
    requests = args.requests
    if requests is None and duration_s is None and made.kind.endless:
        requests = _DEFAULT_REQUESTS
    return WorkloadBounds(requests, duration_s)


def _lines(
    made: Made, form: str, bounds: WorkloadBounds, counted: _Counted
) -> Iterator[dict[str, Any]]:
    if form == "weka":
        assert isinstance(made.workload, Agents)
        for session in counted.sessions(bounded_sessions(made.workload.sessions(), bounds)):
            yield weka(session)
        return
    line = CALL_LINES[form]
    for call in counted.calls(bounded(made.workload.calls(), bounds)):
        yield line(call, made.workload.block_tokens)


class _Counted:
    """Passes on what it counts."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.requests = self.blocks = self.input_tokens = self.output_tokens = 0
        self.last_s = 0.0

    def calls(self, calls: Iterable[WorkloadCall]) -> Iterator[WorkloadCall]:
        for call in calls:
            self._count(call)
            yield call

    def sessions(self, sessions: Iterable[AgentSession]) -> Iterator[AgentSession]:
        for session in sessions:
            for call in session.flat():
                self._count(call)
            yield session

    def _count(self, call: WorkloadCall) -> None:
        self.requests += 1
        self.blocks += len(call.blocks)
        self.input_tokens += call.input_tokens
        self.output_tokens += call.output_tokens
        self.last_s = max(self.last_s, call.time_s)
        self._progress.tell(
            lambda: f"{self.requests:,} requests, {format_duration(self.last_s)} of the trace"
        )


def _show(args: argparse.Namespace, made: Made, form: str, counted: _Counted) -> None:
    figures = {
        "workload": made.name,
        "format": form,
        "seed": args.seed or 0,
        "out": args.out,
        "requests": counted.requests,
        "span_s": round(counted.last_s, 3),
        "input_tokens": counted.input_tokens,
        "output_tokens": counted.output_tokens,
        "made_blocks": counted.blocks,
        "made_block_tokens": made.workload.block_tokens,
    }
    if args.json:
        print_json(figures)
    elif args.out == STDOUT:
        console(stderr=True).print(f"{counted.requests:,} requests", highlight=False)
    else:
        print_table("", ("", ">"), [(name, _cell(value)) for name, value in figures.items()])
    sys.stdout.flush()


def _cell(value: Any) -> Any:
    return f"{value:,.0f}" if isinstance(value, float) else value
