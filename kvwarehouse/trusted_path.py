"""Whether strangers, users other than those that a caller trusts, can put something else in the
place of a path. Each folder and each link on the way counts, as the kernel goes: a name is its
folder's owner's, and everybody's who can write to a folder that is not sticky.

The root folder is not judged: whose it is has this program's own code in hand. Further up than the
folder of a socket a group is its owner's choice, as in homes and in volumes of a pod's group.

Stateless; thread-safe.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LINKS_MAX: Final = 40  # as the kernel's own bound
_ALL_USERS: Final = str((1 << 32) - 1)


@dataclass(frozen=True)
class WeakPoint:
    """What a stranger has in hand: `path`, on the way to what was asked about, and why. `owner`:
    the stranger's uid, or None for a folder that others can write to."""

    path: str
    owner: int | None
    why: str


def weak_point(
    path: str, trusted: Container[int | None], *, group: bool = False
) -> WeakPoint | None:
    """The first one on the way to `path`, as far as that is there; None: it is out of strangers'
    reach. `group`: the folder that it lies in must not be a group's either. Raises OSError where
    the way cannot be looked at."""
    folder = os.path.dirname(os.path.realpath(path))
    shared = False  # somewhere above anybody can make a folder
    for at, facts in _on_the_way(path):
        mode, is_folder = stat.S_IMODE(facts.st_mode), stat.S_ISDIR(facts.st_mode)
        others = stat.S_IWOTH | (stat.S_IWGRP if group and at == folder else 0)
        if facts.st_uid not in trusted and (not is_folder or shared or facts.st_uid != outside()):
            return WeakPoint(at, facts.st_uid, f"belongs to uid {facts.st_uid}")
        if is_folder and mode & others and not mode & stat.S_ISVTX and not _read_only(at):
            return WeakPoint(at, None, f"has mode {mode:04o}, so others can write to it")
        shared = shared or (is_folder and bool(mode & stat.S_IWOTH))
    return None


def _read_only(folder: str) -> bool:
    """Whether it is mounted so, as Kubernetes mounts a ConfigMap, whose folder has mode 0777: here
    nobody can write to it, and elsewhere who mounted it decides."""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def problem(path: str, *, group: bool = False) -> str:
    """As weak_point, for what only this process's user and root are to have in hand: the end of a
    sentence about `path` that says what to do, or ""."""
    us = os.geteuid()
    weak = weak_point(path, {us, 0}, group=group)
    if weak is None:
        return ""
    said = f"is within others' reach: {weak.path} {weak.why}"
    if weak.owner is None:
        return (
            f"{said} and put something else in its place; run: chmod {'go' if group else 'o'}-w "
            f"{weak.path}, or, where others are to have files of their own: chmod +t {weak.path}"
        )
    ours = f"uid {us} and root" if us else "root"
    return (
        f"{said}, who can put something else in its place, and this process runs as uid {us}; use "
        f"a place below folders of {ours} alone, or run as uid {weak.owner}"
    )


def _on_the_way(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Each folder and link that the kernel comes by, without links in its name, and what is at the
    end. Ends where nothing is."""
    here, links = "/", 0
    left = (path if os.path.isabs(path) else os.path.join(os.getcwd(), path)).split("/")[::-1]
    while left:
        name = left.pop()
        if name in ("", ".", ".."):
            here = os.path.dirname(here) if name == ".." else here
            continue
        at = os.path.join(here, name)
        try:
            facts = os.lstat(at)
        except (FileNotFoundError, NotADirectoryError):
            return
        yield at, facts
        if not stat.S_ISLNK(facts.st_mode):
            here = at
            continue
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(at)
        here = "/" if target.startswith("/") else here
        left += target.split("/")[::-1]


def outside() -> int | None:
    """The one number as which all owners are shown who are not in this process's user namespace:
    in a rootless container the host's root, whose /tmp and /dev/shm are mounted. None: all are."""
    try:
        if Path("/proc/self/uid_map").read_text(encoding="utf-8").split()[2:] == [_ALL_USERS]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="utf-8"))
    except OSError:
        return None
