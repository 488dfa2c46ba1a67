"""Whether the disk of the NVMe tier answers at all, before the start waits for it without a bound.

A read that hangs cannot be given up: it keeps its thread, which is left behind. Stateless.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import Final

from kvwarehouse.daemon.directories import segment_files

_BLOCK_BYTES: Final = 4096


def answers(nvme_dir: str, timeout_s: float) -> bool:
    """True when a few of the blocks that a start begins with could be read, or could not, within
    `timeout_s`. Blocks for at most so long, changes nothing, raises nothing."""
    done = threading.Event()
    reads = threading.Thread(target=_read, args=(nvme_dir, done), name="nvme-answer", daemon=True)
    reads.start()
    return done.wait(timeout_s)


def _read(nvme_dir: str, done: threading.Event) -> None:
    try:
        segments = segment_files(nvme_dir)
        for path in {*segments[:1], *segments[len(segments) // 2 :][:1], *segments[-1:]}:
            with contextlib.suppress(OSError):  # what the start will meet too
                _read_block(path)
    finally:
        done.set()


def _read_block(path: str) -> None:
    """From the device, where the filesystem permits it, and not from memory."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError:
        fd = os.open(path, flags)
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block:
            os.preadv(fd, [block], 0)
    finally:
        os.close(fd)
