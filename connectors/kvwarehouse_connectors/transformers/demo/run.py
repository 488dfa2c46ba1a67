"""The demo from beginning to end."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from rich.console import Console

import kvwarehouse as kvw
from kvwarehouse_connectors.transformers.demo import pace as pacing
from kvwarehouse_connectors.transformers.demo.budget import Budget
from kvwarehouse_connectors.transformers.demo.daemon import DemoDaemon
from kvwarehouse_connectors.transformers.demo.outcome import Machine, Outcome, Row
from kvwarehouse_connectors.transformers.demo.progress import Teller
from kvwarehouse_connectors.transformers.demo.show import PIPE_COLUMNS, Findings, machine_line
from kvwarehouse_connectors.transformers.demo.station import OPTIONS, Station
from kvwarehouse_connectors.transformers.demo.subject import Subject, built, checkpoint
from kvwarehouse_connectors.transformers.demo.text import Workload, read_text, workload
from kvwarehouse_connectors.transformers.demo.trial import Trial
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


def run(request: Request, *, started: float, as_json: bool) -> int:
    """Runs the demo and prints what it finds, as it finds it; returns the exit status. started:
    time.monotonic() when the command began. Raises UsageError on what was asked for and cannot be
    done."""
    out = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    findings = Findings(out)
    # One console for both where both are one terminal, or they would write over each other.
    aside = out if sys.stdout.isatty() and not as_json else Console(stderr=True)
    with _terminated_as_interrupted(), Teller(aside) as teller:
        budget = Budget(started, unlimited=request.max_tokens is not None)
        measuring = _Measuring(request, teller, budget)
        if as_json:
            outcome = measuring.run(lambda: None, lambda row: None)
        else:
            outcome = measuring.run(findings.introduce, findings.row)
    if as_json:
        json.dump(outcome.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        findings.close(outcome)
    return _UNEQUAL if outcome.faults else 0


class _Measuring:
    def __init__(self, request: Request, teller: Teller, budget: Budget) -> None:
        self._request = request
        self._teller = teller
        self._budget = budget

    def run(self, introduce: Callable[[], None], show: Callable[[Row], None]) -> Outcome:
        """introduce: called when the machine was measured and rows are about to come. show: called
        with each of them."""
        # Before the demo's own work is part of it.
        machine = Machine(os.cpu_count() or 1, os.getloadavg()[0])
        subject, work = self._prepared()
        longest = len(work.document)
        lengths = tuple(tokens for tokens in pacing.LENGTHS if tokens <= longest)
        with DemoDaemon(_kv_bytes(subject, max(lengths)), self._request.disk) as daemon:
            self._teller.begin("starting the daemon, warming up")
            warm_ids = work.document[: 3 * OPTIONS.chunk_tokens][::-1]
            with Station(subject, daemon, warm_ids) as station:
                pace = replace(self._measured(subject, work), start_s=station.start_s)
                self._teller.say(machine_line(machine, pace))
                introduce()
                trial = Trial(subject, work, station, self._budget, self._teller, pace)
                found = trial.run(lengths, show)
        return Outcome(
            rows=found.rows,
            control=found.control,
            model=subject.description,
            random_weights=subject.random,
            machine=machine,
            pace=pace,
            asked_longest=max(lengths),
            page_tokens=OPTIONS.page_tokens,
            page_bytes=_kv_bytes(subject, OPTIONS.page_tokens),
            pages_stored=found.pages_stored,
            total_s=self._budget.spent_s,
        )

    def _prepared(self) -> tuple[Subject, Workload]:
        request = self._request
        least = pacing.LENGTHS[0]
        if request.max_tokens is not None and request.max_tokens < least:
            raise kvw.UsageError(
                f"--max-tokens {request.max_tokens} is too short to show anything; use"
                f" {least} or more",
                code="bad_max_tokens",
            )
        self._teller.begin("reading the model" if request.model else "building a model")
        text = read_text(request.text)
        subject = checkpoint(request.model) if request.model else built(text)
        require_supported(subject.model)
        longest = min(request.max_tokens or pacing.LENGTHS[-1], pacing.LENGTHS[-1], subject.longest)
        if longest < least:
            raise kvw.UsageError(
                f"the model knows {subject.longest} positions; the demo needs {least}",
                code="bad_model",
            )
        random = ", random weights" if subject.random else ""
        self._teller.say(f"model     {subject.description}{random}")
        return subject, workload(text, subject.encode, longest)

    def _measured(self, subject: Subject, work: Workload) -> pacing.Pace:
        self._teller.begin("measuring this machine")
        grid = ChunkGrid(OPTIONS.page_tokens, OPTIONS.chunk_tokens)
        return pacing.measure(subject.model, work.document, grid)


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
