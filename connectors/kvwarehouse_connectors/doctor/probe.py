"""Imports an engine as its own processes do, and tells what it found: a line of JSON for each step.

Runs as a process of its own (`python -m kvwarehouse_connectors.doctor.probe ENGINE`): an import may
hang, write to stdout, or take the process with it, and none of that may become the doctor's. The
steps of an engine stand in probe_ENGINE.py; what they need is looked up by name, so that another
version of the engine costs a step and not the probe.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

_MOST_TEXT = 400
_ERRORS = {
    "torch": "torch_error",
    "engine": "engine_error",
    "connector": "connector_error",
    "command": "command_error",
}

Found = dict[str, Any]
"""Fields of EngineFacts."""
Step = Callable[[], Found]


def main(engine: str, command: Sequence[str] = ()) -> None:
    # Imports may print: what they print is not ours, and goes where errors go.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module = import_module(f"kvwarehouse_connectors.doctor.probe_{engine}")
    steps: list[tuple[str, Step]] = [
        (step.__name__.strip("_"), step) for step in (_torch, *module.STEPS)
    ]
    if command:
        steps.append(("command", lambda: dict(module.read_command(command))))
    for name, step in steps:
        print(json.dumps({"step": name}), file=answer, flush=True)
        print(json.dumps(_found(name, step)), file=answer, flush=True)


def _found(name: str, step: Step) -> Found:
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - whatever an import raises is the finding
        text = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
        return {_ERRORS[name]: text} if name in _ERRORS else {}


def _torch() -> Found:
    return {"torch": str(import_module("torch").__version__)}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
