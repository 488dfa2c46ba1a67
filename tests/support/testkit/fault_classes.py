"""Every class of fault that the tests inject: what `make faults` counts and docs/guarantees.md
lists. Tests, and native ones through tests/tally.h, name their class exactly as here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvwarehouse_bench.micro.neighbours import WORST


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

    @property
    def is_input(self) -> bool:
        """A fuzzer's: millions of them say less than one crash, so they are counted apart."""
        return self.name.startswith("hostile input")


_SEGMENTS: Final = (
    "every page is right or a miss, those that were not touched are there, the damage is counted"
)
_ARENA: Final = (
    "every page is right or a miss, those that were not touched are there, no slot is forgotten"
)
_LIVE: Final = "every byte that a client is given is right, and the warehouse goes on"


def _in_process(names: tuple[str, ...], holds: str) -> tuple[FaultClass, ...]:
    return tuple(FaultClass(name, "never wrong", holds, live=False) for name in names)


_SEGMENT_DAMAGE: Final = (
    "segment header flipped",
    "record header, digests or witness flipped",
    "record payload flipped",
    "padding of a record flipped",
    "table of contents flipped",
    "footer of a table of contents flipped",
    "free space of a segment flipped",
    "segment cut at a random length",
    "good record copied over another",
    "payloads of two records exchanged",
    "whole segment as it was before",
    "some blocks of a segment as they were before",
    "segment of another warehouse copied in",
    "segment copied to another number",
    "stretch of a segment overwritten with noise",
)
_ARENA_DAMAGE: Final = (
    "slot word flipped",
    "slot metadata flipped",
    "slot payload flipped",
    "padding of a slot flipped",
    "cut of a slab flipped",
    "header of the slots file flipped",
    "control page flipped",
    "index entry flipped under readers",
    "metadata of a slot copied over another",
    "payloads of two slots exchanged",
    "earlier metadata of a slot brought back",
    "stretch of the slots file overwritten with noise",
    "file of the arena cut at a random length",
)

_UNFINISHED_DAMAGE: Final = (
    "word of an unfinished slot flipped",
    "metadata of an unfinished slot flipped",
)
_UNFINISHED_HOLDS: Final = (
    "the daemon goes on, what it says is sealed is there and right, and every slot is free again"
    " once its writers are through"
)

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

_FLUSHES_HOLD: Final = (
    "DRAM serves, nothing that failed is called durable, the tier recovers by itself, and what was"
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
    *_in_process(_SEGMENT_DAMAGE, _SEGMENTS),
    *_in_process(_ARENA_DAMAGE, _ARENA),
    *_in_process(_UNFINISHED_DAMAGE, _UNFINISHED_HOLDS),
    FaultClass(
        "session file filled with garbage",
        "never wrong",
        "the daemon goes on, and what another session pins stays",
        live=False,
    ),
    FaultClass(
        "stored bytes, files or ledger damaged, with a live daemon",
        "never wrong",
        "a miss or the other tier's good copy, counted; or a refusal that names the file",
        live=True,
    ),
    FaultClass(
        "copy of a page flipped, found by check",
        "never wrong",
        "check names exactly the copies that are bad, with tier and reason",
        live=True,
    ),
    FaultClass(
        "bytes of the arena flipped under a running daemon", "never wrong", _LIVE, live=True
    ),
    FaultClass("bytes of slots flipped under a running daemon", "never wrong", _LIVE, live=True),
    FaultClass(
        "bytes of the index flipped under a running daemon", "never wrong", _LIVE, live=True
    ),
    FaultClass("bytes of segments flipped under a running daemon", "never wrong", _LIVE, live=True),
    FaultClass(
        "file of the arena cut under a running daemon",
        "never wrong",
        "engines go on with misses and errors and without a wrong byte; the daemon ends, and says"
        " which file was cut",
        live=True,
    ),
    FaultClass(
        "metadata of unfinished slots flipped while clients store",
        "never wrong",
        "every load is right or a miss, the daemon or the next one goes on, and every slot is free"
        " again once nobody writes",
        live=True,
    ),
    FaultClass(
        "header bytes flipped under a running daemon",
        "nothing lost",
        "the next client finds the header as it was made, and every page",
        live=True,
    ),
    FaultClass(
        "daemon killed (SIGKILL) under traffic",
        "nothing lost",
        "every page reported stored is there, every byte is right, clients go on by themselves",
        live=True,
    ),
    FaultClass(
        "reader held between two steps of a load",
        "never wrong",
        "its page is evicted, reused, cut anew, cleared, damaged or re-attached meanwhile: the "
        "load is right where the slot's generation stands, and a miss where it does not",
        live=False,
    ),
    FaultClass(
        "pin stored between two steps of an eviction",
        "never wrong",
        "the pin holds, through every reuse that is tried, or fails at once",
        live=False,
    ),
    FaultClass(
        "daemon held between two steps, read meanwhile",
        "never wrong",
        "loads through old and new entries are right or a miss",
        live=False,
    ),
    FaultClass(
        "daemon ended at a step of reserve, seal, evict or reuse",
        "nothing lost",
        "the next daemon serves all that was sealed, nothing else, and no slot is lost",
        live=False,
    ),
    FaultClass(
        "writer held between grant and seal",
        "never wrong",
        "its page is given up and stored by another, under the same daemon or the next: the late "
        "bytes are in no page",
        live=False,
    ),
    FaultClass(
        "client held between lookup and load",
        "never wrong",
        "its pages are evicted and reused, or the daemon replaced: right bytes or a miss",
        live=False,
    ),
    FaultClass(
        "client held between lookup and pin",
        "never wrong",
        "a pin that was stored in time holds, a later one may find nothing; what is pinned stays",
        live=False,
    ),
    FaultClass(
        "daemon core killed (SIGKILL) under traffic of native clients",
        "nothing lost",
        "every chain that was reported stored is there, no byte is wrong, clients go on by "
        "themselves",
        live=True,
    ),
    FaultClass(
        "client killed (SIGKILL) in a store, load or pin",
        "nothing lost",
        "the others go on, its slots and pins come back, what was stored stays, no byte is wrong",
        live=True,
    ),
    FaultClass(
        "client stopped (SIGSTOP) beyond every deadline, and continued",
        "never wrong",
        "the others go on meanwhile; its late writes are in no page, and it goes on itself",
        live=True,
    ),
    FaultClass(
        "daemon stopped (SIGSTOP) beyond every deadline, and continued",
        "never wrong",
        "every call of every client ends meanwhile; nothing is wrong and nothing lost afterwards",
        live=True,
    ),
    FaultClass(
        "client forked at a step of a store, load or pin",
        "never wrong",
        "the child's copy refuses every call, its own connection works, the parent's call, pins "
        "and pages are as if nothing had happened",
        live=True,
    ),
    FaultClass(
        "hostile input: messages",
        "never wrong",
        "what is read of it lies inside the message",
        live=False,
    ),
    FaultClass(
        "hostile input: objects",
        "never wrong",
        "each page that is had lies inside, is of its place, and has the key that its tokens make",
        live=False,
    ),
    FaultClass(
        "hostile input: records",
        "never wrong",
        "nothing is taken that is out of bounds",
        live=False,
    ),
    FaultClass(
        "hostile input: segment",
        "never wrong",
        "what is found lies inside, apart, with the payload of its digests",
        live=False,
    ),
    FaultClass(
        "hostile input: server",
        "bounded",
        "each message is answered or hung up on; what others stored is served",
        live=False,
    ),
    FaultClass(
        "hostile input: sessions",
        "bounded",
        "pins, touches and counters are bounded; the session is reaped",
        live=False,
    ),
    FaultClass(
        "hostile input: slots",
        "never wrong",
        "refused, or served without a wrong byte and without a lost slot",
        live=False,
    ),
    FaultClass(
        "hostile input: Python",
        "bounded",
        "requests, settings, small files, ledger records and traces of noise are refused with a "
        "word or served; what others stored is served",
        live=False,
    ),
    *(
        FaultClass(
            f"hostile input at a door: {name}",
            "bounded",
            "good clients, probes and subscribers go on beside it; memory, threads, descriptors and"
            " log stay bounded, and what was stored is served whole",
            live=True,
        )
        for name in (
            "the session socket",
            "the socket of gRPC",
            "TCP without a token",
            "TCP with a token",
            "HTTP",
            "KV events",
            "replays of KV events",
        )
    ),
    *(
        FaultClass(
            f"{name} to a starting daemon's process group",
            "nothing lost",
            "two orderly starts serve all that was sealed, from the tier that had it, and nothing"
            " that was cleared or evicted",
            live=True,
        )
        for name in ("SIGTERM", "SIGINT", "SIGKILL", "SIGHUP")
    ),
    FaultClass(
        "second daemon started on directories in use",
        "nothing lost",
        "refused with the first one's pid, by whatever path it came; the first one serves on, "
        "untouched",
        live=True,
    ),
    FaultClass(
        "read under eviction and reuse at full speed",
        "never wrong",
        "loads through stale entries, a full index, new cuts and a growing arena are right "
        "or a miss; what is pinned is there, whole",
        live=True,
    ),
    FaultClass(
        "warehouse of an earlier format opened",
        "nothing lost",
        "every page of the fixture is served from both tiers or from NVMe alone; what was cleared "
        "or evicted stays away",
        live=True,
    ),
    FaultClass(
        "file or message of a newer version",
        "nothing lost",
        "refused with file, versions and advice; no file is changed; the old version serves all",
        live=True,
    ),
    FaultClass(
        "segment or slots file of a newer version, opened by the core",
        "nothing lost",
        "refused with file, versions and advice; no file is changed; the old version serves all",
        live=False,
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
        "memory filled up by others, then emptied (tmpfs)",
        "nothing lost",
        "every page is there at the next start and the one after it, the log says that the arena"
        " cannot grow, and stores go on",
        live=True,
    ),
    FaultClass(
        "NVMe tier detached for a run or two",
        "nothing lost",
        "three starts with it serve all that was there without it, and nothing that was cleared"
        " or evicted, with it or without",
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
        "DRAM serves, and what the device has no more is a miss",
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
        _FLUSHES_HOLD,
        live=True,
    ),
    FaultClass(
        "read from the disk failed (EIO)",
        "never wrong",
        "what cannot be read is a miss, and the tier takes and serves pages again by itself",
        live=True,
    ),
    FaultClass(
        "write or flush failed now and then (EIO)",
        "nothing lost",
        _FLUSHES_HOLD,
        live=True,
    ),
    FaultClass(
        "disk half a second late at every call",
        "nothing lost",
        _DISK_HOLDS,
        live=True,
    ),
    FaultClass(
        "disk that hangs at a start",
        "nothing lost",
        "DRAM serves, status, metrics and probes say so, the tier is back at the next start, and"
        " what was reported durable is there after a loss of power",
        live=True,
    ),
    *(
        FaultClass(
            f"disk failed under stores, then healthy and idle ({error})",
            "nothing lost",
            "every sealed page reaches NVMe without another store, and is there after a loss of"
            " power",
            live=True,
        )
        for error in ("EIO", "ENOSPC")
    ),
    FaultClass(
        "evict and clear beside reclaim, promotion and store",
        "nothing lost",
        "what was reported evicted, and what a clear found, is away and stays away over a kill, a"
        " stop, and the loss of the arena",
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
        "store beside processes that pin all that they may",
        "bounded",
        _LIMIT_HOLDS,
        live=True,
    ),
    FaultClass(
        "pin beyond a process's budget",
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
    *(
        FaultClass(
            f"client beside one that {what}",
            "bounded",
            "all its calls end, what it stores is there, half of the reserve that it had alone is"
            " its own, and nothing wrong is served to either, also when the bad one goes on",
            live=True,
        )
        for what in (
            "is frozen in its calls",
            *WORST,
        )
    ),
    FaultClass(
        "namespace opened, up to the bound and beyond",
        "bounded",
        _LIMIT_HOLDS,
        live=True,
    ),
    FaultClass(
        "bound reached on top of others, by two tenants",
        "bounded",
        "each call ends by success or by the bound's refusal, and both tenants store and hit pages"
        " of both sizes once what was held is given back",
        live=True,
    ),
    FaultClass(
        "power lost at a call of the ledger to its disk",
        "nothing lost",
        "no clear, no forgetting and no tombstone comes undone, no epoch falls",
        live=False,
    ),
    FaultClass(
        "daemon ended at a step of forgetting a namespace",
        "nothing lost",
        "nothing of it comes back, what others have is there, both copies of the ledger agree",
        live=True,
    ),
)

BY_NAME: Final = {each.name: each for each in CLASSES}


def faults(counts: Mapping[str, int], *, live: bool = False) -> int:
    """How many were injected, without inputs of fuzzers; `live`: of them, those against a running
    warehouse."""
    return sum(
        counts.get(each.name, 0)
        for each in CLASSES
        if not each.is_input and (each.live or not live)
    )


def inputs(counts: Mapping[str, int]) -> int:
    return sum(counts.get(each.name, 0) for each in CLASSES if each.is_input)
