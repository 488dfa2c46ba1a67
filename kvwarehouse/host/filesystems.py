"""File systems that directories are on, or would be made on: their room, their mounts, their disks.
Sizes are bytes; what is free is so for this user. Waits for the file systems. Stateless;
thread-safe. `root` is where /proc and /sys are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvwarehouse.host.files import ROOT, text, word
from kvwarehouse.sizes import format_size

MEMORY_KINDS: Final = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True)
class DirectoryFacts:
    """Of a directory, or of what it would be made in."""

    path: str
    kind: str = ""
    """Of its file system: tmpfs, ext4, ...; "" where that is not known."""
    mount: str = ""
    """Where it is mounted."""
    device: str = ""
    """What is mounted there."""
    options: tuple[str, ...] = ()
    """Of the mount."""
    total_bytes: int = 0
    free_bytes: int = 0
    disk: str = ""
    """The kernel's name of its block device; "" for none."""
    scheduler: str = ""
    rotational: bool = False


def directory_facts(path: str, root: Path = ROOT) -> DirectoryFacts:
    there = existing_parent(path)
    device, mount, kind, options = _mount(there, root)
    queue = disk_queue(os.stat(there).st_dev, root)
    return DirectoryFacts(
        path=path,
        kind=kind,
        mount=mount,
        device=device,
        options=tuple(options.split(",")),
        total_bytes=total_bytes(there),
        free_bytes=free_bytes(there),
        disk=queue.parent.name if queue else "",
        scheduler=word(r"\[(\S+)\]", text(queue / "scheduler")) if queue else "",
        rotational=queue is not None and text(queue / "rotational").strip() == "1",
    )


def existing_parent(path: str) -> str:
    """`path`, or its nearest ancestor that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(os.path.abspath(path))
    return path


def total_bytes(path: str) -> int:
    facts = os.statvfs(existing_parent(path))
    return facts.f_blocks * facts.f_frsize


def free_bytes(path: str) -> int:
    """What an unprivileged process may still write to the file system of `path`."""
    facts = os.statvfs(existing_parent(path))
    return facts.f_bavail * facts.f_frsize


def mount_of(path: str) -> str:
    """The mount point that `path` is (or will be) on."""
    return _mount(existing_parent(path), ROOT)[1]


def free_hint(path: str) -> str:
    """What a sensible bound on `path` might be, for an error's text."""
    free = free_bytes(path)
    gigabytes = free * 4 // 5 // 10**9
    offer = f"{gigabytes}GB" if gigabytes else f"{free * 4 // 5 // 10**6}MB"
    return f"{mount_of(path)} has {format_size(free)} free, so for example --nvme-capacity {offer}"


def disk_queue(device: int, root: Path = ROOT) -> Path | None:
    """The folder that says how the kernel drives the block device of a file system; a partition's
    is that of its disk. None where there is no such device."""
    folder = (root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    found = (each / "queue" for each in (folder, folder.parent))
    return next((queue for queue in found if queue.is_dir()), None)


def _mount(there: str, root: Path) -> tuple[str, str, str, str]:
    """(device, mount point, kind, options) by /proc/self/mounts, where a space is \\040. Of several
    mounts at one place the last is the one that is seen."""
    seen = {}
    for line in text(root / "proc/self/mounts").splitlines():
        device, point, kind, options = line.split(" ")[:4]
        point = point.replace("\\040", " ")
        seen[point] = device, point, kind, options
    point = os.path.realpath(there)
    while point not in seen and point != "/":
        point = os.path.dirname(point)
    return seen.get(point, ("", point, "", ""))
