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


CLASSES: Final = (
    FaultClass(
        "daemon killed (SIGKILL) under traffic",
        "nothing lost",
        "every page reported stored is there, every byte is right, clients go on by themselves",
        live=True,
    ),
)

BY_NAME: Final = {each.name: each for each in CLASSES}
