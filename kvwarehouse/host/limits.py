"""Gathers what this host allows a daemon: limits of its process, memory, kernel, disks. Sizes are
bytes. Looks at /proc and /sys below `root`, which tests make up; asks the kernel once whether
io_uring is allowed. Stateless.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvwarehouse.host import daemon_process
from kvwarehouse.host.files import ROOT, number, text, word
from kvwarehouse.host.filesystems import DirectoryFacts, directory_facts
from kvwarehouse.host.memory import UNLIMITED, group_limit, machine_bytes, usable_bytes
from kvwarehouse.places import default_dram_bytes

_IO_URING_SETUP = 425  # on x86-64 and on ARM
_MAY_LOCK = 1 << 14  # CAP_IPC_LOCK of capabilities(7)


@dataclass(frozen=True)
class HostLimits:
    arena: DirectoryFacts
    nvme: DirectoryFacts | None = None
    dram_bytes: int = 0
    nvme_bytes: int = 0
    index_pages: int = 0
    """0: as many as the core chooses for the capacities."""
    policy: str = ""
    pid: int = 0
    """Of the daemon whose limits these are; 0: of a process that is started here."""
    memlock_bytes: int = UNLIMITED
    may_lock: bool = False
    """Whether the process may lock memory whatever its limit is (CAP_IPC_LOCK)."""
    descriptors: int = UNLIMITED
    """The hard limit, to which the daemon raises its own."""
    memory_bytes: int = 0
    group_bytes: int = UNLIMITED
    """The least limit of its control group and of those above."""
    group_file: str = ""
    io_uring_errno: int = 0
    """Why the kernel refuses it; 0: it does not."""
    io_uring_disabled: int = 0
    """Of the sysctl: 1 for processes without a right, 2 for all."""
    filters_calls: bool = False
    """Whether the process has a seccomp filter."""
    kernel: tuple[int, int] = (0, 0)
    has_huge_pages: bool = True
    """Whether the kernel has transparent ones, and lets the process have them."""
    reserved_bytes: int = 0
    """Of memory that is set aside for hugetlbfs, and free."""
    nodes: int = 1
    """Of memory (NUMA) that the process may use."""
    spreads: bool = False
    """Whether the mount of the arena takes memory of all nodes in turn (mpol=interleave)."""


@dataclass(frozen=True)
class Tiers:
    """What the daemon has, or is to have; 0 and "" where nobody said."""

    dram_bytes: int = 0
    nvme_bytes: int = 0
    arena_dir: str = ""
    nvme_dir: str = ""
    pid: int = 0
    remote: str = ""
    """URL of a store; only what was asked for."""
    fleet_secret: str = ""
    """Its file; only what was asked for."""
    index_pages: int = 0
    policy: str = ""


CoreMemory = Callable[[Tiers], tuple[int, int]]
"""What the core of a daemon with such tiers takes beside DRAM and its headers, in bytes: (of the
index, which lies beside the arena; of its tables). The core knows it, which no module here imports:
the caller brings it."""


def io_uring_errno() -> int:
    """With what the kernel refuses it to this process; 0: it does not. Makes no ring."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_IO_URING_SETUP, 1, None) >= 0:
        return 0
    errno = ctypes.get_errno()
    return 0 if errno == 14 else errno  # EFAULT: it came to reading our parameters


def tiers_of(pid: int, status: Mapping[str, Any]) -> Tiers:
    """What a daemon has, as far as its status and its process (0: none that is seen) tell."""
    arena, nvme = daemon_process.directories_of(pid) if pid else ("", "")
    core = status.get("core", {})
    tiers = core.get("tiers", {})
    dram, disk = (int(tiers.get(name, {}).get("capacity_bytes", 0)) for name in ("dram", "nvme"))
    pages = int(core.get("index", {}).get("capacity", 0))
    return Tiers(dram, disk, arena, nvme, pid, index_pages=pages, policy=core.get("policy", ""))


def with_asked(tiers: Tiers, asked: Tiers) -> Tiers:
    """`asked` where it says something, else `tiers`. Of other capacities the index is another."""
    given = {name: value for name, value in vars(asked).items() if value}
    if asked.dram_bytes or asked.nvme_bytes:
        tiers = replace(tiers, index_pages=0)
    return replace(tiers, **given)


def host_limits(
    tiers: Tiers, root: Path = ROOT, *, io_uring: Callable[[], int] = io_uring_errno
) -> HostLimits:
    process = str(tiers.pid) if tiers.pid else "self"
    limits = text(root / "proc" / process / "limits")
    status = text(root / "proc" / process / "status")
    group, file = group_limit(process, root)
    arena = directory_facts(tiers.arena_dir or "/dev/shm", root)
    huge = root / "sys/kernel/mm/transparent_hugepage"
    return HostLimits(
        arena=arena,
        nvme=directory_facts(tiers.nvme_dir, root) if tiers.nvme_dir else None,
        dram_bytes=tiers.dram_bytes
        or default_dram_bytes(usable_bytes(process, root), arena.total_bytes),
        nvme_bytes=tiers.nvme_bytes,
        index_pages=tiers.index_pages,
        policy=tiers.policy,
        pid=tiers.pid,
        memlock_bytes=_limit("Max locked memory", limits, hard=False),
        may_lock=bool(int(word(r"CapEff:\s+(\w+)", status) or "0", 16) & _MAY_LOCK),
        descriptors=_limit("Max open files", limits, hard=True),
        memory_bytes=machine_bytes(root),
        group_bytes=group,
        group_file=file,
        io_uring_errno=io_uring(),
        io_uring_disabled=number(r"(\d+)", text(root / "proc/sys/kernel/io_uring_disabled")),
        filters_calls=word(r"Seccomp:\s+(\d+)", status) == "2",
        kernel=_version(text(root / "proc/sys/kernel/osrelease")),
        has_huge_pages=huge.is_dir() and word(r"THP_enabled:\s+(\d+)", status) != "0",
        reserved_bytes=_reserved_bytes(root),
        nodes=_count(word(r"Mems_allowed_list:\s+(\S+)", status)),
        spreads=any(option.startswith("mpol=interleave") for option in arena.options),
    )


def _reserved_bytes(root: Path) -> int:
    found = 0
    for folder in (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB"):
        page_bytes = 1024 * number(r"hugepages-(\d+)kB", folder.name)
        found += page_bytes * number(r"(\d+)", text(folder / "free_hugepages"))
    return found


def _limit(name: str, limits: str, *, hard: bool) -> int:
    """Of /proc/PID/limits; UNLIMITED also where it is not told."""
    match = re.search(rf"^{name}\s+(\S+)\s+(\S+)", limits, re.MULTILINE)
    value = match[2 if hard else 1] if match else "unlimited"
    return int(value) if value.isdigit() else UNLIMITED


def _count(ranges: str) -> int:
    """Of "0-1,4": 3. 1 where nothing is told."""
    count = 0
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count or 1


def _version(release: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)
