"""Runs a module of this package in a process of its own, and reads the lines of JSON that it told,
however it ended. A vendor's library may spin for ever, write to stdout or take its process with it.
`run_probe` is the parent's side, `report_steps` the child's.

Thread-safe. Blocks for at most the timeout and a moment; a child that cannot be killed (it hangs in
the kernel) is left behind rather than waited for.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LIMIT = "KVW_CHILD_LIMIT_S"
"""Tells the child when to end by itself: this process may end before it."""
_REAP_S = 5.0
_LAST_LINES = 3
_MOST_TEXT = 400


@dataclass(frozen=True)
class Told:
    answers: Sequence[dict[str, Any]]
    """In their order; those of a child that was ended are the ones before its end."""
    problem: str = ""
    """Why it did not end by itself and well; empty where it did."""
    steps: Sequence[str] = field(default_factory=tuple)
    """What it said it was about to do; the last is where it ended."""


def run_probe(
    module: str,
    arguments: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Told:
    """A line with the key "step" announces what comes next. `environment`: beside that of this
    process. The child has a folder of its own to work in, which goes again: libraries leave logs
    there."""
    with (
        tempfile.TemporaryDirectory(prefix="kvw-gpu-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=folder,
            env={**os.environ, **(environment or {}), LIMIT: str(math.ceil(timeout_s))},
            start_new_session=True,
        )
        problem = _ended(child, timeout_s)
        out.seek(0)
        err.seek(0)
        if child.returncode:
            last = err.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
            problem = problem or f"ended with status {child.returncode}: {' / '.join(last)}"
        answers, steps = _parsed(out.read().decode(errors="replace"))
    return Told(answers, problem[:_MOST_TEXT], steps)


def _ended(child: subprocess.Popen[bytes], timeout_s: float) -> str:
    try:
        child.wait(timeout_s)
        return ""
    except subprocess.TimeoutExpired:
        problem = f"did not end within {timeout_s:g} s and was killed"
    except BaseException:
        _kill(child)
        raise
    _kill(child)
    return problem


def _kill(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)  # the session that it leads, and nobody else
        child.wait(_REAP_S)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        return


def _parsed(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    answers: list[dict[str, Any]] = []
    steps: list[str] = []
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # cut off, or a library's own words
        if not isinstance(said, dict):
            continue
        if "step" in said:
            steps.append(str(said["step"]))
        else:
            answers.append(said)
    return answers, steps


def report_steps(steps: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Announces each step, runs it, and says what it found; a step that raises has said
    {name_error}. Stdout is for these answers alone, whatever libraries print. Ends the process
    behind the parent's limit, whatever it does then."""
    if limit_s := os.environ.get(LIMIT):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(limit_s) + 1)
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for name, step in steps.items():
        print(json.dumps({"step": name}), file=answer, flush=True)
        try:
            found = step()
        except Exception as error:  # noqa: BLE001 - whatever a library raises is the finding
            found = {f"{name}_error": f"{type(error).__name__}: {error}"[:_MOST_TEXT]}
        print(json.dumps(found), file=answer, flush=True)
