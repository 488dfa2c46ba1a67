"""Memory that processes of this host may use, in bytes: the machine's, and what their control
groups leave of it. Stateless; thread-safe. `root` is where / is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvwarehouse.host.files import ROOT, number, text

UNLIMITED: Final = -1

# Where a control group's memory limit is, by the hierarchy that /proc/PID/cgroup names: of
# version 2, and of version 1.
_GROUP_LIMITS: Final = {
    "": ("/sys/fs/cgroup", "memory.max"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}
# Of version 1 a limit of nearly 2**63 bytes is none.
_NO_LIMIT_BYTES: Final = 1 << 60

DAEMON_BYTES: Final = 64 << 20
"""An idle daemon's own, beside arena, index and the core's tables: 64 MB as measured
(docs/benchmarks.md). What a start refuses by, and what the doctor says of one."""

HEADERS_SHARE: Final = 64
"""Of the arena: slot headers. 1/64 covers pages down to about 32 KiB. An estimate: the core
allocates what it needs before it publishes anything, and refuses by name."""


def with_headers(dram_bytes: int) -> int:
    """Of a DRAM tier and of the headers of its slots."""
    return dram_bytes + dram_bytes // HEADERS_SHARE


def machine_bytes(root: Path = ROOT) -> int:
    """All of it. A unit may hide /proc/meminfo (ProcSubset=pid)."""
    pages = os.sysconf("SC_PHYS_PAGES")
    return _of_meminfo("MemTotal", root) or pages * os.sysconf("SC_PAGE_SIZE")


def available_bytes(root: Path = ROOT) -> int:
    """What new programs may have of it; 0: not known."""
    return _of_meminfo("MemAvailable", root)


def usable_bytes(process: str = "self", root: Path = ROOT) -> int:
    """The machine's, or the limit of the process's control group (a container's, a unit's) where
    that is less."""
    machine, (limit, _) = machine_bytes(root), group_limit(process, root)
    return machine if limit == UNLIMITED else min(machine, limit)


def group_limit(process: str = "self", root: Path = ROOT) -> tuple[int, str]:
    """(the least limit, its file) of a process's control group and of those above it."""
    found = [(UNLIMITED, "")]
    for file in group_limit_files(text(root / "proc" / process / "cgroup")):
        limit = text(root / file.lstrip("/")).strip()
        if limit.isdigit() and int(limit) < _NO_LIMIT_BYTES:
            found.append((int(limit), file))
    return min(found[1:] or found, key=lambda each: each[0])


def group_limit_files(groups: str) -> list[str]:
    """Files that may hold a memory limit of a process whose /proc/PID/cgroup says `groups`: of its
    own group and of those above, for each binds. A container sees its group as the root, whatever
    path it is told."""
    found = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in _GROUP_LIMITS.keys() & set(controllers.split(",")):
            base, name = _GROUP_LIMITS[controller]
            for group in (path, *map(str, Path(path).parents)):
                found.append(os.path.join(base, group.strip("/"), name))
    return found


def _of_meminfo(name: str, root: Path) -> int:
    return 1024 * number(rf"{name}:\s+(\d+)", text(root / "proc/meminfo"))
