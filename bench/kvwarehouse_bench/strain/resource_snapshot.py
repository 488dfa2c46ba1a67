"""What a daemon and its clients hold at one moment of rest, and whether it grew.

Read from /proc, the directories and the daemon's own status. Stateless; thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import kvwarehouse as kvw
from kvwarehouse_bench.harness.serving import Serving


@dataclass(frozen=True)
class GrowthAllowance:
    what: str
    more: float  # allowed at the end beyond what stood after the warm-up
    why: str


# Everything that is not named here may not grow at all.
ALLOWED: Final = {
    each.what: each
    for each in (
        GrowthAllowance(
            "daemon: memory, MiB", 16, "allocators keep what they had at their busiest"
        ),
        GrowthAllowance("daemon: threads", 4, "gRPC keeps a few threads at hand"),
        GrowthAllowance("daemon: file handles", 2, "segments are opened when they are used"),
        GrowthAllowance("clients: memory, MiB", 24, "as the daemon's"),
        GrowthAllowance("clients: threads", 2, "as the daemon's"),
        GrowthAllowance("nvme directory: files", 2, "a segment that is on its way in or out"),
        GrowthAllowance("nvme directory: MiB", 8, "a segment that is on its way in or out"),
        GrowthAllowance(
            "arena directory: MiB", 1, "the index of a new start, before the old one goes"
        ),
    )
}

ResourceSnapshot = Mapping[str, float]


def take(serving: Serving, client: kvw.Client) -> ResourceSnapshot:
    """At rest: nothing is being stored or loaded."""
    core = client.status()["core"]
    dram = core["tiers"]["dram"]
    return {
        **_process("daemon", serving.pid),
        **_process("clients", os.getpid()),
        "sessions": core["sessions"],
        "connections": core["connections"],
        "pins held": core["pins"]["held"],
        "slots reserved": dram["reserved_slots"],
        "slots in limbo": dram["limbo_slots"],
        "slots closing": dram["zombie_slots"],
        **_folder("arena directory", serving.arena_dir),
        **_folder("nvme directory", serving.nvme_dir),
    }


def grown(before: ResourceSnapshot, after: ResourceSnapshot) -> list[str]:
    """What is more than it may be."""
    return [what for what, value in after.items() if value > before[what] + allowed(what)]


def allowed(what: str) -> float:
    return ALLOWED[what].more if what in ALLOWED else 0.0


def _process(who: str, pid: int) -> dict[str, float]:
    facts = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        # Of its own: what is shared is the arena, whose size is given.
        f"{who}: memory, MiB": int(facts["RssAnon"].split()[0]) / 1024,
        f"{who}: threads": int(facts["Threads"]),
        f"{who}: file handles": len(os.listdir(f"/proc/{pid}/fd")),
    }


def _folder(name: str, path: Path) -> dict[str, float]:
    files = [entry for entry in path.rglob("*") if entry.is_file()]
    size_bytes = sum(file.stat().st_blocks * 512 for file in files)
    return {f"{name}: files": len(files), f"{name}: MiB": size_bytes / 2**20}
