"""Runs the probe in a process of its own and reads what it told, however it ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kvwarehouse_connectors.doctor.facts import EngineFacts

_PROBE = (sys.executable, "-P", "-m", "kvwarehouse_connectors.doctor.probe")
_LAST_LINES = 3


def probe(engine: str, command: Sequence[str] = ()) -> list[str]:
    """The command that looks at an engine, one of engines.ENGINES, and at what it makes of the
    arguments of a command line of its own."""
    return [*_PROBE, engine, *command]


def engine_facts(command: Sequence[str], timeout_s: float) -> EngineFacts:
    """command: as probe() has it. Blocks for at most timeout_s. An engine that no distribution
    brings is still tried: it may lie on PYTHONPATH."""
    try:
        ended = subprocess.run(
            list(command), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        told = error.stdout or b""
        text = told.decode() if isinstance(told, bytes) else told
        return _facts(text, f"did not end within {timeout_s:g} s")
    crash = ""
    if ended.returncode:
        last = " / ".join(ended.stderr.strip().splitlines()[-_LAST_LINES:])
        crash = f"ended with status {ended.returncode}: {last}"
    return _facts(ended.stdout, crash)


def _facts(told: str, crash: str) -> EngineFacts:
    known = {field.name for field in fields(EngineFacts)} - {"crash"}
    values: dict[str, Any] = {}
    step = "start"
    for line in told.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # cut off
        step = found.pop("step", step)
        values |= {name: value for name, value in found.items() if name in known}
    return EngineFacts(**values, crash=f"in the step {step!r} it {crash}" if crash else "")
