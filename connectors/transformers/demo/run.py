"""The demo from beginning to end."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import transformers

import kvwarehouse as kvw
from kvwarehouse_connectors.transformers.demo import pace as pacing
from kvwarehouse_connectors.transformers.demo.daemon import DemoDaemon
from kvwarehouse_connectors.transformers.demo.outcome import Outcome
from kvwarehouse_connectors.transformers.demo.progress import Teller
from kvwarehouse_connectors.transformers.demo.show import show
from kvwarehouse_connectors.transformers.demo.subject import Subject, built, checkpoint
from kvwarehouse_connectors.transformers.demo.text import Workload, read_text, workload
from kvwarehouse_connectors.transformers.demo.trial import OPTIONS, Trial
from kvwarehouse_connectors.transformers.grid import ChunkGrid
from kvwarehouse_connectors.transformers.support import observe, require_supported

_UNEQUAL = 4
"""The command line's exit status for "done, and the answer is bad news"."""


@dataclass(frozen=True)
class Request:
    """What the user asked for; None where the demo chooses."""

    model: str | None
    max_tokens: int | None
    text: str | None
    disk: str | None


def run(request: Request, *, as_json: bool) -> int:
    """Runs the demo and prints what it found; returns the exit status. Raises UsageError on what
    was asked for and cannot be done."""
    with _terminated_as_interrupted():
        outcome = _measured(request)
    if as_json:
        json.dump(outcome.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(outcome)
    return _UNEQUAL if outcome.faults else 0


def _measured(request: Request) -> Outcome:
    if request.max_tokens is not None and request.max_tokens < pacing.LENGTHS[0]:
        raise kvw.UsageError(
            f"--max-tokens {request.max_tokens} is too short to show anything; use"
            f" {pacing.LENGTHS[0]} or more",
            code="bad_max_tokens",
        )
    transformers.logging.set_verbosity_error()
    started = time.perf_counter()
    with Teller() as teller:
        subject, work = _prepared(request, teller)
        longest = len(work.document)
        pace = pacing.measure(
            subject.model, work.document, ChunkGrid(OPTIONS.page_tokens, OPTIONS.chunk_tokens)
        )
        lengths = _lengths(request, pace, longest, teller)
        teller.expect(pace.demo_s(lengths))
        with DemoDaemon(_kv_bytes(subject, max(lengths)), request.disk) as daemon:
            trial = Trial(subject, work, daemon, teller, pace)
            budget_s = math.inf if request.max_tokens else pacing.BUDGET_S
            rows, control, pages_stored = trial.run(lengths, budget_s)
        return Outcome(
            rows=rows,
            control=control,
            model=subject.description,
            random_weights=subject.random,
            pace=pace,
            asked_longest=max(n for n in pacing.LENGTHS if n <= longest),
            page_tokens=OPTIONS.page_tokens,
            page_bytes=_kv_bytes(subject, OPTIONS.page_tokens),
            pages_stored=pages_stored,
            total_s=time.perf_counter() - started,
        )


def _prepared(request: Request, teller: Teller) -> tuple[Subject, Workload]:
    teller.step("reading the model" if request.model else "building a model")
    text = read_text(request.text)
    subject = checkpoint(request.model) if request.model else built(text)
    require_supported(subject.model)
    longest = min(request.max_tokens or pacing.LENGTHS[-1], pacing.LENGTHS[-1], subject.longest)
    if longest < pacing.LENGTHS[0]:
        raise kvw.UsageError(
            f"the model knows {subject.longest} positions; the demo needs {pacing.LENGTHS[0]}",
            code="bad_model",
        )
    teller.say(f"model     {subject.description}{', random weights' if subject.random else ''}")
    teller.step("measuring this machine")
    return subject, workload(text, subject.encode, longest)


def _lengths(request: Request, pace: pacing.Pace, longest: int, teller: Teller) -> tuple[int, ...]:
    if request.max_tokens is not None:
        return tuple(tokens for tokens in pacing.LENGTHS if tokens <= longest)
    lengths = pace.lengths(longest)
    wanted = max(tokens for tokens in pacing.LENGTHS if tokens <= longest)
    speed = f"{pacing.UNIT_TOKENS / pace.unit_s:,.0f} tokens/s"
    if max(lengths) < wanted:
        teller.say(
            f"machine   {speed}: the document is cut to {max(lengths):,} tokens, so that the demo"
            f" ends in time\n          (--max-tokens {wanted} for all of it, about"
            f" {pace.demo_s([n for n in pacing.LENGTHS if n <= wanted]) / 60:,.0f} minutes)"
        )
    else:
        teller.say(f"machine   {speed}")
    return lengths


def _kv_bytes(subject: Subject, tokens: int) -> int:
    return tokens * sum(plane.token_bytes for plane in observe(subject.model).planes)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the demo as an interrupt does, so that its daemon and directories go."""

    def interrupt(number: int, frame: FrameType | None) -> Any:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
