"""The child's side of bounded_child.py: stdout is for answers alone, whatever libraries print."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from kvwarehouse.gpu.bounded_child import LIMIT

_MOST_TEXT = 400


def tell(steps: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Announces each step, runs it, and says what it found; a step that raises has said
    {name_error}. Ends the process behind bounded_child's limit, whatever it does then."""
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
