"""How bytes get from a segment's file to a stage: the seam between held extents and what reads
them.

Here: preadv, for stages in host memory. kvwarehouse/gpu/kvikio_mover.py: kvikio, for a device's.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

_THREADS = 8
"""As deep a queue as the daemon's own reads have: more does not make one device faster."""


@dataclass(frozen=True)
class HeldFile:
    path: str
    """Opens the file again, as long as it is held."""
    descriptor: int
    direct: bool
    """Whether the descriptor was opened with O_DIRECT."""
    identity: tuple[int, int]
    """(device, inode): the same file under any path."""


Finished = Callable[[], None]
"""Blocks until a transfer has ended, and raises OSError or RuntimeError where it failed. To be
called exactly once for each transfer, also for those nobody wants any more: it writes until
then."""


class Mover(Protocol):
    name: str
    """For people: "preadv", "kvikio (GDS)", ..."""

    def start(self, file: HeldFile, offset_bytes: int, target: Any) -> Finished:
        """Begins to fill `target`, a part of a stage, from `offset_bytes` of the file. Offset and
        size are multiples of 4096; so is the place of `target` in memory."""
        ...

    def close(self) -> None:
        """After every transfer has ended."""
        ...


class PreadMover:
    """Into host memory, by threads that call preadv. Thread-safe."""

    name = "preadv"

    def __init__(self, threads: int = _THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvw-preadv")

    def start(self, file: HeldFile, offset_bytes: int, target: Any) -> Finished:
        future: Future[None] = self._threads.submit(
            read_whole, file.descriptor, memoryview(target), offset_bytes
        )
        return future.result

    def close(self) -> None:
        self._threads.shutdown(wait=True)


def read_whole(descriptor: int, target: memoryview, offset_bytes: int) -> None:
    """Fills `target`. Raises OSError, also where the file ends before."""
    done = 0
    while done < len(target):
        got = os.preadv(descriptor, [target[done:]], offset_bytes + done)
        if got == 0:
            raise OSError(errno.EIO, f"the file ends {len(target) - done} bytes too early")
        done += got
