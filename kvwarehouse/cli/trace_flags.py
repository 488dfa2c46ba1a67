"""Flags that say how a trace is read: of `replay` and `drive`."""

from __future__ import annotations

import argparse

from kvwarehouse.errors import UsageError
from kvwarehouse.trace.file import FORMATS, ReadOptions, read_trace
from kvwarehouse.trace.trace import Trace

_MOST_BLOCK_TOKENS = 1_000_000


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reading the trace")
    group.add_argument("--format", choices=FORMATS, help="(default: found out).")
    group.add_argument(
        "--block-tokens", type=int, metavar="N", help="Tokens of a block (default: the format's)."
    )
    group.add_argument(
        "--skip-bad", action="store_true", help="Count malformed lines and go on without them."
    )
    group.add_argument(
        "--session-gap",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="Between the starts of sessions whose times are their own (default: 0).",
    )


def trace_from(path: str, args: argparse.Namespace) -> Trace:
    """Raises UsageError for a flag that cannot be, or what is wrong with the trace."""
    if args.block_tokens is not None and not 1 <= args.block_tokens <= _MOST_BLOCK_TOKENS:
        raise UsageError(
            f"--block-tokens {args.block_tokens} cannot be; use 1 to {_MOST_BLOCK_TOKENS:,}",
            code="bad_tokens",
        )
    if not 0 <= args.session_gap < 1e9:
        raise UsageError(
            f"--session-gap {args.session_gap:g} cannot be; use 0 or more seconds", code="bad_gap"
        )
    options = ReadOptions(args.format, args.block_tokens, args.skip_bad, args.session_gap)
    return read_trace(path, options)
