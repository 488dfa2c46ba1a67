"""How bytes get from a segment's file to a stage: the seam between held extents and what reads
them.

Here: preadv, for stages in host memory. kvwarehouse/gpu/kvikio_mover.py: kvikio, for a device's.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import inf
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


Finished = Callable[[float], bool]
"""Waits for a transfer to end, for at most the seconds given (math.inf: as long as it takes):
whether it has. Raises OSError, RuntimeError or WarehouseError where it has ended and failed. Until
one of these, it may still write. To be called until it has ended, also for what nobody wants any
more, and not again. The target is the caller's to keep until then."""


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
        return end_of(
            [self._threads.submit(read_whole, file.descriptor, memoryview(target), offset_bytes)]
        )

    def close(self) -> None:
        self._threads.shutdown(wait=True)


def end_of(reads: Sequence[Future[None]]) -> Finished:
    """Of a transfer that threads make by these; it fails by the first of them that did."""

    def finished(timeout_s: float) -> bool:
        if wait(reads, None if timeout_s == inf else timeout_s).not_done:
            return False
        for each in reads:
            each.result()
        return True

    return finished


def read_whole(descriptor: int, target: memoryview, offset_bytes: int) -> None:
    """Fills `target`. Raises OSError, also where the file ends before."""
    done = 0
    while done < len(target):
        got = os.preadv(descriptor, [target[done:]], offset_bytes + done)
        if got == 0:
            raise OSError(errno.EIO, f"the file ends {len(target) - done} bytes too early")
        done += got
