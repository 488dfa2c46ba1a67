"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """A file that is at `path` (0600) once the block has ended well, durably, in the place of what
    was there: after a crash that is the old file or the new one. Where the block or the writing
    raises, what was there stays. Raises OSError."""
    # No two writers share it, also where they are processes of the same number in two containers.
    scratch = f"{path}.{secrets.token_hex(8)}.tmp"
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.rename(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
    sync_directory(os.path.dirname(os.path.abspath(path)))


def write_atomic(path: str, data: bytes) -> None:
    """As replacing()."""
    with replacing(path) as file:
        file.write(data)


def sync_directory(directory: str) -> None:
    """Makes renames in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
