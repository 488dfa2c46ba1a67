"""Every class of fault that the tests inject: what `make faults` counts and docs/guarantees.md
lists. Tests, and native ones through tests/tally.h, name their class exactly as here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class FaultClass:
    name: str
    """What is done, in one short line."""
    promise: str
    """"never wrong", "nothing lost", "bounded": the promise that it tries to break."""
    holds: str
    """What was checked after each of them."""
    live: bool
    """Against processes of a running warehouse; else inside a test's own process."""


_LOG_HOLDS: Final = (
    "nothing wrong is read, what was reported durable is there, all room is used again, lives rise;"
    " also when the crash comes while recovering from a crash"
)

CLASSES: Final = (
    FaultClass(
        "daemon killed (SIGKILL) under traffic",
        "nothing lost",
        "every page reported stored is there, every byte is right, clients go on by themselves",
        live=True,
    ),
    FaultClass(
        "power lost at a moment of the NVMe log: nothing unsynced is left",
        "nothing lost",
        _LOG_HOLDS,
        live=False,
    ),
    FaultClass(
        "power lost at a moment of the NVMe log: any subset of unsynced writes is left",
        "nothing lost",
        _LOG_HOLDS,
        live=False,
    ),
    FaultClass(
        "power lost at a moment of the NVMe log: unsynced writes are torn at 512 bytes",
        "never wrong",
        _LOG_HOLDS,
        live=False,
    ),
    FaultClass(
        "process killed at a moment of the NVMe log: writes in flight are torn",
        "nothing lost",
        _LOG_HOLDS,
        live=False,
    ),
)

BY_NAME: Final = {each.name: each for each in CLASSES}
