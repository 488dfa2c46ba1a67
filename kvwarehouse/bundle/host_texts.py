"""What a bundle says of a host: kernel, processors, memory, limits, the mounts and disks of its
directories. Texts of the kernel's own files, each under its path; what is not there is left out.
Stateless; thread-safe. `root` is where / is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kvwarehouse.host.files import ROOT, text
from kvwarehouse.host.filesystems import directory_facts, disk_queue, existing_parent
from kvwarehouse.host.memory import group_limit_files
from kvwarehouse.sizes import format_size

_FILES_MATCHED: Final = 64

# What is matched is sorted. Of the processors one is enough: they are alike.
_KERNEL: Final = (
    "proc/version",
    "proc/cmdline",
    "etc/os-release",
    "proc/uptime",
    "proc/loadavg",
    "proc/pressure/*",
    "proc/sys/kernel/io_uring_disabled",
    "proc/sys/kernel/io_uring_group",
    "proc/sys/kernel/numa_balancing",
    "proc/sys/vm/overcommit_memory",
    "proc/sys/vm/overcommit_ratio",
    "proc/sys/vm/swappiness",
    "proc/sys/vm/max_map_count",
    "proc/sys/vm/dirty_*",
    "proc/sys/fs/file-nr",
    "proc/sys/fs/nr_open",
    "sys/kernel/mm/transparent_hugepage/enabled",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "sys/kernel/mm/hugepages/*/nr_hugepages",
    "sys/kernel/mm/hugepages/*/free_hugepages",
)
_PROCESSORS: Final = (
    "sys/devices/system/cpu/online",
    "sys/devices/system/cpu/smt/active",
    "sys/devices/system/node/online",
    "sys/devices/system/node/node*/cpulist",
    "sys/devices/system/node/node*/distance",
    "sys/devices/system/node/node*/meminfo",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
)
_MEMORY: Final = ("proc/meminfo", "proc/swaps", "proc/vmstat")
_OF_A_GROUP: Final = (
    "memory.max",
    "memory.high",
    "memory.current",
    "memory.swap.max",
    "memory.events",
    "memory.limit_in_bytes",
    "cpu.max",
    "cpuset.cpus.effective",
    "io.max",
    "pids.max",
)
_OF_A_QUEUE: Final = (
    "scheduler",
    "rotational",
    "nr_requests",
    "read_ahead_kb",
    "max_sectors_kb",
    "logical_block_size",
    "write_cache",
    "io_timeout",
)


def kernel(root: Path = ROOT) -> str:
    return _shown(_matched(root, _KERNEL))


def processors(root: Path = ROOT) -> str:
    first = text(root / "proc/cpuinfo").partition("\n\n")[0]
    return f"== one of /proc/cpuinfo\n{first}\n\n{_shown(_matched(root, _PROCESSORS))}"


def memory(root: Path = ROOT) -> str:
    """Of the host, and what its control group leaves to process self."""
    return _shown(_matched(root, _MEMORY)) + cgroup(root)


def cgroup(root: Path = ROOT, process: str = "self") -> str:
    """The limits of a process's control group and of those above it."""
    groups = text(root / "proc" / process / "cgroup")
    folders = dict.fromkeys(os.path.dirname(path) for path in group_limit_files(groups))
    files = [root / folder.lstrip("/") / name for folder in folders for name in _OF_A_GROUP]
    return f"== /proc/{process}/cgroup\n{groups.strip()}\n\n{_shown((root, f) for f in files)}"


def directories(paths: Iterable[str], root: Path = ROOT) -> str:
    """Of each: who may do what there, how large its file system is and how full, its mount, and
    how its disk is set up. Waits for the file systems."""
    return "\n\n".join(_directory(path, root) for path in dict.fromkeys(paths) if path) + "\n"


def _directory(path: str, root: Path) -> str:
    there, facts = existing_parent(path), directory_facts(path, root)
    own, space = os.stat(there), os.statvfs(there)
    mount = f"{facts.device} {facts.mount} {facts.kind} {','.join(facts.options)}"
    lines = [f"== {path}"]
    if there != path:
        lines.append(f"it does not exist; what follows is of {there}")
    lines += [
        f"mode {own.st_mode & 0o7777:04o}, uid {own.st_uid}, gid {own.st_gid}",
        f"{format_size(facts.total_bytes)}, {format_size(facts.free_bytes)} free for this user;"
        f" {space.f_files:,} inodes, {space.f_favail:,} free",
        f"mount: {mount if facts.device else '(not in /proc/self/mounts)'}",
        disk(own.st_dev, root),
    ]
    return "\n".join(filter(None, lines))


def disk(device: int, root: Path = ROOT) -> str:
    """How the kernel drives the block device of a file system; "" where there is none."""
    queue = disk_queue(device, root)
    if queue is None:
        return ""
    model = text(queue.parent / "device/model").strip()
    lines = [f"disk {queue.parent.name}{f' ({model})' if model else ''}"]
    for name in _OF_A_QUEUE:
        if value := text(queue / name).strip():
            lines.append(f"  {name}: {value}")
    return "\n".join(lines)


def _matched(root: Path, patterns: Iterable[str]) -> Iterator[tuple[Path, Path]]:
    for pattern in patterns:
        yield from ((root, path) for path in sorted(root.glob(pattern))[:_FILES_MATCHED])


def _shown(files: Iterable[tuple[Path, Path]]) -> str:
    parts = []
    for root, path in files:
        if value := text(path).strip():
            parts.append(f"== /{path.relative_to(root)}\n{value}\n\n")
    return "".join(parts)
