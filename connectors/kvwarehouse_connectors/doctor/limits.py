"""Gathers what this host allows a daemon: limits of its process, memory, kernel, disks. Looks at
/proc and /sys below `root`, which tests make up; asks the kernel once whether io_uring is allowed.
Stateless.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_CONNECT_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid
_IO_URING_SETUP = 425  # on x86-64 and on ARM
_MAY_LOCK = 1 << 14  # CAP_IPC_LOCK of capabilities(7)
_UNLIMITED = -1
# Of cgroup version 1 a limit of nearly 2**63 bytes is none.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class DirectoryFacts:
    """Of a directory that a daemon has, or would make."""

    path: str
    kind: str = ""
    """Of its file system: tmpfs, ext4, ...; "" where that is not known."""
    mount: str = ""
    read_only: bool = False
    total_bytes: int = 0
    free_bytes: int = 0
    """For this user."""
    disk: str = ""
    """The kernel's name of its block device; "" for none."""
    scheduler: str = ""
    rotational: bool = False


@dataclass(frozen=True)
class HostLimits:
    arena: DirectoryFacts
    nvme: DirectoryFacts | None = None
    dram_bytes: int = 0
    nvme_bytes: int = 0
    pid: int = 0
    """Of the daemon whose limits these are; 0: of a process that is started here."""
    memlock_bytes: int = _UNLIMITED
    may_lock: bool = False
    """Whether the process may lock memory whatever its limit is (CAP_IPC_LOCK)."""
    descriptors: int = _UNLIMITED
    """The hard limit, to which the daemon raises its own."""
    memory_bytes: int = 0
    group_bytes: int = _UNLIMITED
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


def io_uring_errno() -> int:
    """With what the kernel refuses it to this process; 0: it does not. Makes no ring."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_IO_URING_SETUP, 1, None) >= 0:
        return 0
    errno = ctypes.get_errno()
    return 0 if errno == 14 else errno  # EFAULT: it came to reading our parameters


def host_limits(
    tiers: Tiers, root: Path = _ROOT, *, io_uring: Callable[[], int] = io_uring_errno
) -> HostLimits:
    process = root / "proc" / (str(tiers.pid) if tiers.pid else "self")
    limits, status = _text(process / "limits"), _text(process / "status")
    memory = 1024 * _number(r"MemTotal:\s+(\d+)", _text(root / "proc/meminfo"))
    group, file = _group_limit(_text(process / "cgroup"), root)
    bound = memory if group == _UNLIMITED else min(memory, group)
    arena = directory_facts(tiers.arena_dir or "/dev/shm", root)
    huge = root / "sys/kernel/mm/transparent_hugepage"
    mounts = _text(root / "proc/self/mounts")
    return HostLimits(
        arena=arena,
        nvme=directory_facts(tiers.nvme_dir, root) if tiers.nvme_dir else None,
        # As `kvwarehouse serve` chooses it.
        dram_bytes=tiers.dram_bytes or min(bound // 8, arena.total_bytes // 2),
        nvme_bytes=tiers.nvme_bytes,
        pid=tiers.pid,
        memlock_bytes=_limit("Max locked memory", limits, hard=False),
        may_lock=bool(int(_word(r"CapEff:\s+(\w+)", status) or "0", 16) & _MAY_LOCK),
        descriptors=_limit("Max open files", limits, hard=True),
        memory_bytes=memory,
        group_bytes=group,
        group_file=file,
        io_uring_errno=io_uring(),
        io_uring_disabled=_number(r"(\d+)", _text(root / "proc/sys/kernel/io_uring_disabled")),
        filters_calls=_word(r"Seccomp:\s+(\d+)", status) == "2",
        kernel=_version(_text(root / "proc/sys/kernel/osrelease")),
        has_huge_pages=huge.is_dir() and _word(r"THP_enabled:\s+(\d+)", status) != "0",
        reserved_bytes=_reserved_bytes(root),
        nodes=_count(_word(r"Mems_allowed_list:\s+(\S+)", status)),
        spreads=any("mpol=interleave" in line for line in _mounts_of(arena.mount, mounts)),
    )


def pid_at(path: str) -> int:
    """Of the process that listens at a local socket; 0 where that cannot be told."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.settimeout(_CONNECT_S)
            end.connect(path)
            given = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return 0
    return int(_CREDENTIALS.unpack(given)[0])


def directories_of(pid: int, root: Path = _ROOT) -> tuple[str, str]:
    """(the arena's, that of the NVMe tier) of a daemon, by the files that it has open; "" where
    there is none."""
    arena = nvme = ""
    try:
        links = sorted((root / "proc" / str(pid) / "fd").iterdir())
    except OSError:
        return "", ""
    for link in links:
        try:
            folder, name = os.path.split(os.readlink(link).removesuffix(" (deleted)"))
        except OSError:
            continue
        if name == "arena":
            arena = folder
        elif name.endswith(".seg"):
            nvme = os.path.dirname(folder)
        elif name == "ledger.mdb" and not nvme and folder != arena:
            nvme = folder
    return arena, nvme if nvme != arena else ""


def directory_facts(path: str, root: Path = _ROOT) -> DirectoryFacts:
    """Of a directory, or of what it would be made in."""
    there = os.path.abspath(path)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    space = os.statvfs(there)
    mount = os.path.realpath(there)
    lines = _text(root / "proc/self/mounts")
    while not _mounts_of(mount, lines) and mount != "/":
        mount = os.path.dirname(mount)
    fields = (_mounts_of(mount, lines) or ["- - - -"])[-1].split(" ")
    kind, options = ("", "") if fields[2] == "-" else (fields[2], fields[3])
    disk, queue = _disk(os.stat(there).st_dev, root)
    return DirectoryFacts(
        path=path,
        kind=kind,
        mount=mount,
        read_only="ro" in options.split(","),
        total_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
        disk=disk,
        scheduler=_word(r"\[(\S+)\]", _text(queue / "scheduler")) if disk else "",
        rotational=bool(disk) and _text(queue / "rotational").strip() == "1",
    )


def _disk(device: int, root: Path) -> tuple[str, Path]:
    """(name, folder of its queue); a partition's disk is the folder above."""
    folder = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    if not folder.exists():
        return "", folder
    whole = folder.resolve()
    if not (whole / "queue").exists():
        whole = whole.parent
    return whole.name, whole / "queue"


def _mounts_of(mount: str, mounts: str) -> list[str]:
    """Lines of /proc/self/mounts; the last is the one that is seen."""
    shown = mount.replace(" ", "\\040")
    return [line for line in mounts.splitlines() if line.split(" ")[1:2] == [shown]]


def _group_limit(groups: str, root: Path) -> tuple[int, str]:
    """(the least limit, its file) of a control group and those above it, of either version."""
    least, where = _UNLIMITED, ""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        base, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:
            base, name = base / "memory", "memory.limit_in_bytes"
            if "memory" not in controllers.split(","):
                continue
        for group in (path, *map(str, Path(path).parents)):
            file = base / group.strip("/") / name
            text = _text(file).strip()
            found = int(text) if text.isdigit() else _NO_LIMIT_BYTES
            if found < (_NO_LIMIT_BYTES if least == _UNLIMITED else least):
                least, where = found, f"/{file.relative_to(root)}"
    return least, where


def _reserved_bytes(root: Path) -> int:
    found = 0
    for folder in (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB"):
        size = 1024 * _number(r"hugepages-(\d+)kB", folder.name)
        found += size * _number(r"(\d+)", _text(folder / "free_hugepages"))
    return found


def _limit(name: str, limits: str, *, hard: bool) -> int:
    """Of /proc/PID/limits; _UNLIMITED also where it is not told."""
    match = re.search(rf"^{name}\s+(\S+)\s+(\S+)", limits, re.MULTILINE)
    text = match[2 if hard else 1] if match else "unlimited"
    return int(text) if text.isdigit() else _UNLIMITED


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


def _word(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _number(pattern: str, text: str) -> int:
    return int(_word(pattern, text) or "0")


def _text(path: Path) -> str:
    """ "" where there is no such file, or it is not ours to read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
