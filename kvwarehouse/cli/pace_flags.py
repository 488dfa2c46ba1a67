"""Flags that say how fast and how long a drive goes."""

from __future__ import annotations

import argparse

from kvwarehouse.durations import parse_duration
from kvwarehouse.errors import UsageError
from kvwarehouse.loadgen.drive import DriveBounds

_MOST_WORKERS = 10_000
_OPEN_WORKERS = 128


def add_pace_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how fast, how long")
    one = group.add_mutually_exclusive_group()
    one.add_argument(
        "--speed",
        type=float,
        metavar="F",
        help="Open loop: at the trace's times, F times as fast (default: 1).",
    )
    one.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="Closed loop: N requests under way, the next as soon as one is done; times are left"
        " out, and a turn may go out before the one it continues is answered.",
    )
    group.add_argument(
        "--most-in-flight",
        type=int,
        metavar="N",
        help=f"Of an open loop; beyond it requests go out late, which is said (default:"
        f" {_OPEN_WORKERS}).",
    )
    group.add_argument("--requests", type=int, metavar="N", help="At most so many.")
    group.add_argument(
        "--duration",
        metavar="TIME",
        help="Start requests for so long (90s, 15m, 2h, 3d); those under way are waited for.",
    )
    group.add_argument(
        "--again",
        action="store_true",
        help="Begin a trace again at its end, with prompts that nothing before it has left.",
    )
    group.add_argument(
        "--deadline", default="120s", metavar="TIME", help="Of each request (default: 120s)."
    )


def bounds_from(args: argparse.Namespace) -> DriveBounds:
    if args.concurrency is not None and args.most_in_flight is not None:
        raise UsageError("--concurrency has its own bound; leave --most-in-flight out")
    workers = args.concurrency or args.most_in_flight
    workers = _OPEN_WORKERS if workers is None else workers
    for flag, value in (
        ("--concurrency", args.concurrency),
        ("--most-in-flight", args.most_in_flight),
    ):
        if value is not None and not 1 <= value <= _MOST_WORKERS:
            raise UsageError(f"{flag} {value} cannot be; use 1 to {_MOST_WORKERS:,}")
    speed = 1.0 if args.speed is None else args.speed
    if not 0 < speed <= 1e6:
        raise UsageError(f"--speed {speed:g} cannot be; use above 0, up to a million")
    if args.requests is not None and args.requests < 1:
        raise UsageError(f"--requests {args.requests} cannot be; use 1 or more", code="bad_bounds")
    duration_s = None
    if args.duration is not None:
        duration_s = parse_duration(args.duration, name="--duration")
    return DriveBounds(
        workers,
        None if args.concurrency is not None else speed,
        args.requests,
        duration_s,
        parse_duration(args.deadline, name="--deadline", most_s=86_400),
    )


def describe_pace(bounds: DriveBounds) -> str:
    """For people."""
    if bounds.speed is None:
        return f"closed, {bounds.workers:,} under way"
    return f"open, {bounds.speed:g} times the trace's speed"
