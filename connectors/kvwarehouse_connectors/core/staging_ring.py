"""Room for pages on their way to the warehouse: a ring of host memory with a hard bound.

An engine's blocks may be written again as soon as its step ends, so a store copies them here first
and the slow part works on the copy. Room is given and taken back in the same order. Full means
that the warehouse is slower than the engine: the newest pages are left out, nobody waits.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
from numpy.typing import NDArray

# Rows begin at whole cache lines.
_ALIGN_BYTES = 64


class ByteBudget:
    """A bound on the bytes of device memory that pages on their way out may take, where they are
    copied within the device and not to a ring."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, size_bytes: int) -> bool:
        """False, and nothing taken, where that would be over the bound. Never blocks."""
        with self._lock:
            fits = self._used_bytes + size_bytes <= self._size_bytes
            self._used_bytes += size_bytes if fits else 0
        return fits

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= size_bytes
            assert self._used_bytes >= 0, f"{size_bytes} bytes were given back twice"


class StagingRing:
    """size_bytes: of its memory, which is all that it ever takes."""

    def __init__(self, size_bytes: int) -> None:
        # Not np.zeros: memory is taken from the system as it is first used.
        self._memory = np.empty(size_bytes, np.uint8)
        self._lock = threading.Lock()
        self._taken: deque[tuple[int, int]] = deque()  # (begin, end) in the order given

    @property
    def size_bytes(self) -> int:
        return len(self._memory)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(end - begin for begin, end in self._taken)

    def take(self, rows: int, row_bytes: int) -> NDArray[np.uint8] | None:
        """uint8 (rows, row_bytes), C-contiguous, until it is given back; None where there is no
        room for all of it in one piece."""
        size = -(-rows * row_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        with self._lock:
            begin = self._place(size)
            if begin is None:
                return None
            self._taken.append((begin, begin + size))
        return self._memory[begin : begin + rows * row_bytes].reshape(rows, row_bytes)

    def undo(self) -> None:
        """Cancels the caller's own most recent `take()`."""
        with self._lock:
            self._taken.pop()

    def give_back(self) -> None:
        """Ends the use of what was taken first of all that is taken now."""
        with self._lock:
            self._taken.popleft()

    def _place(self, size: int) -> int | None:
        if not self._taken:
            return 0 if size <= self.size_bytes else None
        first = self._taken[0][0]
        last, end = self._taken[-1]
        if last < first:  # it went round: free is what lies between
            return end if end + size <= first else None
        if end + size <= self.size_bytes:
            return end
        return 0 if size <= first else None
