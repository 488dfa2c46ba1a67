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

_ARENA_HOLDS: Final = (
    "no load is wrong, what was sealed is there, what was taken away stays away, no slot is free"
    " under a living writer or reader, none is lost; also when the next daemon ends in its recovery"
)

_DISK_HOLDS: Final = (
    "DRAM serves, status, metrics and probes say so, the tier recovers by itself, and what was"
    " reported durable is there after a loss of power"
)

_DICTIONARY_HOLDS: Final = (
    "every load is the dictionary's bytes or a miss, what was stored is there or counted as left,"
    " what was cleared stays away, what is found damaged is what was damaged"
)

_LIMIT_HOLDS: Final = (
    "what is too much is refused with its bound or evicted, those who are there are served, the"
    " daemon's memory stays bounded, and there is room again once some is given back"
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
    FaultClass(
        "daemon ended at a store: reserve, join, seal, publish",
        "nothing lost",
        _ARENA_HOLDS,
        live=False,
    ),
    FaultClass(
        "daemon ended at a store: settle, give up, limbo",
        "nothing lost",
        _ARENA_HOLDS,
        live=False,
    ),
    FaultClass(
        "daemon ended at a store: evict, quarantine, clear",
        "nothing lost",
        _ARENA_HOLDS,
        live=False,
    ),
    FaultClass(
        "daemon ended at a store: slab handed to another page size",
        "nothing lost",
        _ARENA_HOLDS,
        live=False,
    ),
    FaultClass(
        "daemon ended at a store: write-behind and promotion",
        "nothing lost",
        _ARENA_HOLDS,
        live=False,
    ),
    FaultClass(
        "disk filled up by others, then emptied (tmpfs)",
        "nothing lost",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "disk full from the start, then emptied (tmpfs)",
        "nothing lost",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "filesystem read-only, then writable (ext4)",
        "nothing lost",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "device lost its end (ext4 over a shortened file)",
        "never wrong",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "write to the disk failed (EIO)",
        "nothing lost",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "write to the disk failed (ENOSPC)",
        "nothing lost",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "write to the disk failed (EROFS)",
        "nothing lost",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "flush of the disk failed (EIO)",
        "nothing lost",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "read from the disk failed (EIO)",
        "never wrong",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "write or flush failed now and then (EIO)",
        "nothing lost",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "disk half a second late at every call",
        "nothing lost",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "daemon killed between random operations, then checked against a dictionary",
        "nothing lost",
        _DICTIONARY_HOLDS,
        live=True,
    ),
    FaultClass(
        "daemon stopped or drained between random operations, then checked",
        "nothing lost",
        _DICTIONARY_HOLDS,
        live=True,
    ),
    FaultClass(
        "arena lost between random operations, then checked against a dictionary",
        "nothing lost",
        _DICTIONARY_HOLDS,
        live=True,
    ),
    FaultClass(
        "disk failed under random operations",
        "nothing lost",
        _DICTIONARY_HOLDS,
        live=True,
    ),
    FaultClass(
        "bit flipped in the arena between random operations",
        "never wrong",
        _DICTIONARY_HOLDS,
        live=True,
    ),
    FaultClass(
        "bit flipped in the segments between random operations",
        "never wrong",
        _DICTIONARY_HOLDS,
        live=True,
    ),
    FaultClass(
        "sessions up to the bound, and one more",
        "bounded",
        _LIMIT_HOLDS,
        live=True,
    ),
    FaultClass(
        "connection while the daemon has no file handle left",
        "bounded",
        _LIMIT_HOLDS,
        live=True,
    ),
    FaultClass(
        "store into an arena full of pinned pages",
        "bounded",
        _LIMIT_HOLDS,
        live=True,
    ),
    FaultClass(
        "pin beyond a session's budget",
        "bounded",
        _LIMIT_HOLDS,
        live=True,
    ),
    FaultClass(
        "twice the NVMe tier's capacity stored",
        "bounded",
        _LIMIT_HOLDS,
        live=True,
    ),
    FaultClass(
        "prompt beyond the longest that there may be",
        "bounded",
        _LIMIT_HOLDS,
        live=True,
    ),
    FaultClass(
        "message at or beyond the bound, or of noise, on the local socket",
        "bounded",
        _LIMIT_HOLDS,
        live=True,
    ),
    FaultClass(
        "namespace opened, up to the bound and beyond",
        "bounded",
        _LIMIT_HOLDS,
        live=True,
    ),
    FaultClass(
        "power lost at a call of the ledger to its disk",
        "nothing lost",
        "no clear and no tombstone comes undone, no namespace changes its number, no epoch falls",
        live=False,
    ),
)

BY_NAME: Final = {each.name: each for each in CLASSES}
