"""`kvwarehouse replay`: what tiers of given sizes would hit on a recorded trace."""

from __future__ import annotations

import argparse
from dataclasses import replace

from kvwarehouse import settings
from kvwarehouse.cli.exit_codes import Exit
from kvwarehouse.cli.hardware_flags import (
    add_engine_flags,
    add_tier_flags,
    gpu_from,
    prefill_from,
    tiers_from,
    with_given_size,
)
from kvwarehouse.cli.model_flags import add_model_flags, footprint_from, has_model
from kvwarehouse.cli.output import add_report_output, print_report
from kvwarehouse.cli.trace_flags import add_trace_flags, trace_from
from kvwarehouse.errors import UsageError
from kvwarehouse.model.footprint import Footprint
from kvwarehouse.planning.latency import can_estimate_prefill
from kvwarehouse.planning.replay import (
    ReplayRun,
    ReplaySetup,
    ReplayTiming,
    compared,
    first_tokens,
    run_replay,
    sweep,
    sweep_sizes,
)
from kvwarehouse.planning.replay_report import Curve, ReplayAnswer, replay_report
from kvwarehouse.sizes import parse_size
from kvwarehouse.trace.anonymize import write_recording
from kvwarehouse.trace.trace import Trace

EXAMPLES = """\
  kvwarehouse replay trace.jsonl                              an endless cache: the most there is
  kvwarehouse replay trace.jsonl --dram-pages 10000 --json
  kvwarehouse replay trace.jsonl --model llama-3.1-8b --dram 256GiB --nvme 4TB --compare
  kvwarehouse replay trace.jsonl --sweep --html curve.html    the miss-ratio curve
  kvwarehouse replay sessions/ --sweep 1000,5000,20000        a folder of agent sessions

Reads Mooncake, Bailian and WEKA traces and its own recordings. docs/sizing.md explains the figures.
"""

_MOST_SWEEP = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="A file, or a folder of session files.")
    add_trace_flags(parser)
    _add_sizes(parser)
    parser.add_argument(
        "--policy",
        default="lru",
        metavar="NAME",
        help="lru, adaptive, s3fifo, or opt: the most that any policy could hit, from the future"
        " (default: lru).",
    )
    parser.add_argument(
        "--leaves-first",
        action="store_true",
        help="Evict as the daemon does: no page before its descendants"
        " (default: page by page, as published figures are computed).",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="Also every policy, in both orders of eviction, and opt.",
    )
    parser.add_argument(
        "--sweep",
        nargs="?",
        const="",
        metavar="SIZES",
        help="Also the miss-ratio curve: DRAM sizes in pages or as 64GiB, separated by commas"
        " (default: up to all pages, doubling).",
    )
    parser.add_argument(
        "--record", metavar="FILE", help="Write the trace as a recording: keyed hashes, no tokens."
    )
    add_model_flags(parser)
    add_engine_flags(parser)
    add_tier_flags(parser, remote=False)
    add_report_output(parser)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the tiers (default: DRAM without end, no NVMe)")
    for tier, title in (("dram", "DRAM"), ("nvme", "NVMe")):
        one = group.add_mutually_exclusive_group()
        one.add_argument(f"--{tier}", metavar="SIZE", help=f"The {title} tier, such as 64GiB.")
        one.add_argument(f"--{tier}-pages", type=int, metavar="N", help="The same in pages.")
    group.add_argument(
        "--nvme-writes-per-day",
        metavar="N|SIZE",
        help="What NVMe may be written a day, as of serve: times its capacity (1.0), or a size"
        " (default: no bound).",
    )
    group.add_argument(
        "--page-bytes",
        metavar="SIZE",
        help="Of a block's KV (default: of the model that is given).",
    )


def run(args: argparse.Namespace) -> int:
    trace = trace_from(args.trace, args)
    footprint = with_given_size(footprint_from(args), args) if has_model(args) else None
    page_bytes = _page_bytes(args, trace, footprint)
    nvme_pages = _pages(args, "nvme", page_bytes) or 0
    setup = ReplaySetup(
        args.policy,
        _pages(args, "dram", page_bytes),
        nvme_pages,
        args.leaves_first,
        _pages_per_day(args, nvme_pages, page_bytes),
    )
    found = run_replay(trace, setup)
    unbounded = replace(setup, nvme_pages_per_day=0)
    answer = ReplayAnswer(
        found,
        run_replay(trace, unbounded) if setup != unbounded else None,
        [run_replay(trace, each) for each in compared(setup)] if args.compare else (),
        _curves(args, trace, setup, page_bytes),
        page_bytes,
    )
    if footprint is not None and page_bytes:
        answer = _with_times(answer, found, _timing(args, footprint, page_bytes))
    if args.record is not None:
        write_recording(trace, args.record)
    print_report(replay_report(answer), args)
    return Exit.OK


def _page_bytes(args: argparse.Namespace, trace: Trace, footprint: Footprint | None) -> int | None:
    if args.page_bytes is not None:
        given = parse_size(args.page_bytes, name="--page-bytes")
        if given < 1:
            raise UsageError("--page-bytes 0 cannot be; use 1 or more", code="bad_size")
        return given
    if footprint is None:
        return None
    if not footprint.bytes_per_token:
        raise UsageError(
            f"{footprint.model.name} keeps no KV per token: its pages have no size",
            code="impossible_shape",
        )
    return footprint.bytes_per_token * trace.block_tokens


def _pages(args: argparse.Namespace, tier: str, page_bytes: int | None) -> int | None:
    """The tier's capacity in pages, None where it is not given."""
    pages: int | None = getattr(args, f"{tier}_pages")
    size: str | None = getattr(args, tier)
    if size is not None:
        pages = _in_pages(size, f"--{tier}", page_bytes)
    if pages is not None and pages < 1:
        raise UsageError(
            f"--{tier}{'' if size else '-pages'} {size or pages} holds no page; use a larger one",
            code="bad_pages",
        )
    return pages


def _in_pages(size: str, flag: str, page_bytes: int | None) -> int:
    size_bytes = parse_size(size, name=flag)
    if page_bytes is None:
        raise UsageError(
            f"{flag} {size} says bytes, and how large a page is is not known; give --model or"
            f" --page-bytes, or {flag}-pages",
            code="missing_flag",
        )
    return size_bytes // page_bytes


def _pages_per_day(args: argparse.Namespace, nvme_pages: int, page_bytes: int | None) -> int:
    """That NVMe may be written; 0: no bound."""
    flag = "--nvme-writes-per-day"
    text = settings.daily(args.nvme_writes_per_day or "", flag)
    if not text:
        return 0
    if not nvme_pages:
        raise UsageError(
            f"{flag} {text} needs an NVMe tier; give --nvme or --nvme-pages", code="missing_flag"
        )
    if page_bytes is None and not settings.is_number(text):
        return max(1, _in_pages(text, flag, page_bytes))
    each = page_bytes or 1
    return max(1, settings.daily_bytes(text, flag, nvme_pages * each) // each)


def _curves(
    args: argparse.Namespace, trace: Trace, setup: ReplaySetup, page_bytes: int | None
) -> list[Curve]:
    if args.sweep is None:
        return []
    sizes = _sweep_sizes(args.sweep, page_bytes) if args.sweep else sweep_sizes(trace)
    setups = compared(setup) if args.compare else [setup]
    return [(each, sweep(trace, each, sizes)) for each in setups]


def _sweep_sizes(text: str, page_bytes: int | None) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    sizes = sorted(
        {
            int(part) if part.isdecimal() else _in_pages(part, "--sweep", page_bytes)
            for part in parts
        }
    )
    if not 1 <= len(sizes) <= _MOST_SWEEP or sizes[0] < 1:
        raise UsageError(
            f"--sweep {text} must be 1 to {_MOST_SWEEP} sizes of 1 page or more", code="bad_pages"
        )
    return sizes


def _timing(args: argparse.Namespace, footprint: Footprint, page_bytes: int) -> ReplayTiming | None:
    """None where nothing says how fast the model computes."""
    if args.prefill_tokens_per_s is None and not can_estimate_prefill(footprint.model):
        return None
    gpu = gpu_from(args)
    dram, nvme = tiers_from(args, gpu)
    # Pages of a size that was given are loaded as they are.
    held = footprint if args.page_bytes is None else None
    return ReplayTiming(prefill_from(args, footprint, gpu), dram, nvme, page_bytes, held)


def _with_times(
    answer: ReplayAnswer, found: ReplayRun, timing: ReplayTiming | None
) -> ReplayAnswer:
    if timing is None:
        return answer
    return replace(answer, times=first_tokens(found, timing), times_assume=timing.assumption)
