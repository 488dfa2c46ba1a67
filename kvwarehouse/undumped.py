"""Memory for KV on its way, which this process's core dumps leave out. Stateless; thread-safe."""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

_HUGE_FROM_BYTES: Final = 4 << 20
"""From here on huge pages are asked for, as numpy does of its own memory."""


def undumped(size_bytes: int) -> NDArray[np.uint8]:
    """`size_bytes` zeros from a memory page's boundary on, given back with the last array over
    them."""
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE)
    memory.madvise(mmap.MADV_DONTDUMP)
    if size_bytes >= _HUGE_FROM_BYTES:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
