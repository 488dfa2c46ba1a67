"""The temporary directory of a private daemon, and the removal of those whose owners were killed.

A folder is in use while anyone holds a shared lock on its file "lock": the parent and the daemon
each do, so it goes only after both.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "kvw-embedded-"
_NEW_PREFIX = ".kvw-new-"
_LOCK = "lock"
_SHARED_MEMORY = "/dev/shm"
_SPARE_BYTES = 64 << 20


class PrivateFolder:
    """Made 0700, on tmpfs where there is one: the arena lies in it. Not thread-safe."""

    def __init__(self, dram_bytes: int) -> None:
        """`dram_bytes`: what the arena in it will take."""
        # All before one is chosen: what was left in tmpfs may be why it has no room.
        for each in (_SHARED_MEMORY, tempfile.gettempdir()):
            sweep(Path(each))
        base = _base(dram_bytes)
        new = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX, dir=base))
        self._lock = hold(new / _LOCK)
        # Only now does it have a name that others sweep.
        self.path = new.with_name(_PREFIX + new.name.removeprefix(_NEW_PREFIX))
        new.rename(self.path)

    @property
    def lock_path(self) -> Path:
        return self.path / _LOCK

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def hold(lock: Path) -> int:
    """Takes a shared lock; returns its descriptor. It ends when the descriptor, and every copy of
    it in forked children, is closed."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _base(dram_bytes: int) -> str:
    """tmpfs, or a disk's page cache where tmpfs is missing or small (64 MiB in many containers)."""
    if os.access(_SHARED_MEMORY, os.W_OK):
        free = shutil.disk_usage(_SHARED_MEMORY).free
        if free >= dram_bytes + dram_bytes // 64 + _SPARE_BYTES:
            return _SHARED_MEMORY
    return tempfile.gettempdir()


def sweep(base: Path) -> None:
    """Removes the folders of this user that nobody holds any more."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid == os.geteuid() and not _in_use(folder / _LOCK):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # another sweeper was faster


def _in_use(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
