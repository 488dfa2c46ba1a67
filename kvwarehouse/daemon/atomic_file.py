"""Small files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os


def write_atomic(path: str, data: bytes) -> None:
    """Replaces `path` (0600) by `data`, durably: after a crash it is the old file or the new one.
    Raises OSError; then the old file stands."""
    scratch = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(scratch)
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
    sync_directory(os.path.dirname(path))


def sync_directory(directory: str) -> None:
    """Makes renames in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
