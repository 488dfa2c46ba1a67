"""Counts injected faults, for `make faults` and docs/guarantees.md.

    tally.count("page byte flipped in the arena")       # after what had to hold was checked
    for _ in range(tally.rounds(20)): ...               # `make faults` goes round more often

A fault is counted once what must hold after it was checked; a check that fails ends its test, so
that a count says: injected, and nothing wrong, nothing lost. Names are those of fault_classes.py.
The counts of this process are written at its end to a file of its own in the folder KVW_TALLY
names; without that variable nothing is written. Thread-safe.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Final

from testkit.fault_classes import BY_NAME

FOLDER: Final = "KVW_TALLY"
ROUNDS: Final = "KVW_ROUNDS"

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def rounds(usual: int) -> int:
    """How often a test goes round: `usual`, times KVW_ROUNDS."""
    return usual * int(os.environ.get(ROUNDS, "1"))


def count(name: str, injected: int = 1) -> None:
    """KeyError for a name that fault_classes.py does not have."""
    _ = BY_NAME[name]
    with _lock:
        if not _counts:
            atexit.register(_write)
        _counts[name] += injected


def read(folder: Path) -> Counter[str]:
    """What all processes wrote. A name that fault_classes.py does not have is a KeyError."""
    total: Counter[str] = Counter()
    for path in folder.glob("*.tally"):
        for name, injected in json.loads(path.read_text(encoding="utf-8")).items():
            _ = BY_NAME[name]
            total[name] += injected
    return total


def _write() -> None:
    folder = os.environ.get(FOLDER)
    if folder:
        path = Path(folder) / f"{os.getpid()}-{os.urandom(4).hex()}.tally"
        path.write_text(json.dumps(_counts), encoding="utf-8")
