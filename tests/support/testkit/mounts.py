"""Small filesystems of a test's own, in a mount namespace of its own: nothing outside sees them,
and they are gone with the last process that was started inside, however the test ends.

    with own_mounts():
        mount_tmpfs(folder, "24m")

Only the calling thread and what it starts are inside. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvwarehouse_bench.harness.eventually import eventually

_NEW_MOUNTS: Final = 0x00020000  # CLONE_NEWNS
_OWN_MOUNTS: Final = "/proc/thread-self/ns/mnt"


class NoMountsError(Exception):
    """This process may not mount, or a tool is missing; the text says which."""


@contextlib.contextmanager
def own_mounts() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    folder, outside = os.getcwd(), os.open(_OWN_MOUNTS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_NEW_MOUNTS) != 0:
            raise NoMountsError(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
        try:
            _run("mount", "--make-rprivate", "/")
            yield
        finally:
            # Refused while a thread that this one began inside lives: gRPC's end a little later.
            eventually(lambda: libc.setns(outside, _NEW_MOUNTS) == 0, "the mount namespace is left")
            os.chdir(folder)
    finally:
        os.close(outside)


def mount_tmpfs(folder: Path, size: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))


def mount_image(folder: Path, image: Path, size_bytes: int, filesystem: str = "ext4") -> None:
    """A new ext4 or ext2 in the file `image`, over a loop device that goes with its mount."""
    folder.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run(f"mkfs.{filesystem}", "-q", "-F", str(image))
    _run("mount", "-o", "loop", str(image), str(folder))


def remount(folder: Path, option: str) -> None:
    """`option`: "ro", which needs that nobody writes, or "rw"."""
    _run("mount", "-o", f"remount,{option}", str(folder))


def _run(*command: str) -> None:
    if shutil.which(command[0]) is None:
        raise NoMountsError(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoMountsError(f"{' '.join(command)}: {done.stderr.strip()}")
