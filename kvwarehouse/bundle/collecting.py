"""Runs the sources of a bundle, each on a thread of its own with a deadline: whatever does not
answer costs its deadline and its own text, and nothing else. One owner; not thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvwarehouse.errors import WarehouseError

DEADLINE_S: Final = 5.0
"""Of one source that says no other."""


@dataclass(frozen=True)
class BundleSource:
    name: str
    """Of its file in the bundle."""
    what: str
    collect: Callable[[], str]
    """Raises WarehouseError, OSError or LookupError that says why there is nothing to be had."""
    deadline_s: float = DEADLINE_S
    keep_end: bool = False
    """Which part of a text that is too long is kept."""


@dataclass(frozen=True)
class Collected:
    source: BundleSource
    text: str
    problem: str
    """Why there is no text; "" where there is one."""
    took_s: float


def collect(source: BundleSource) -> Collected:
    """Returns within about the deadline. A thread that hangs is left behind; it keeps no process
    from ending."""
    begun = time.monotonic()
    answers: list[tuple[str, str]] = []

    def work() -> None:
        try:
            answers.append((source.collect(), ""))
        except WarehouseError as error:
            answers.append(("", f"{error} [{error.code}]"))
        except (OSError, LookupError) as error:
            answers.append(("", str(error) or repr(error)))
        except Exception as error:  # noqa: BLE001  a thread's edge: one source must not cost all
            answers.append(("", f"a bug of this command: {error!r}"))

    thread = threading.Thread(target=work, name=f"bundle {source.name}", daemon=True)
    thread.start()
    thread.join(source.deadline_s)
    text, problem = answers[0] if answers else ("", f"no answer within {source.deadline_s:g} s")
    return Collected(source, text, problem, time.monotonic() - begun)
