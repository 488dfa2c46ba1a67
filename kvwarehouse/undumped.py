"""Memory for KV on its way, which this process's core dumps leave out. Stateless; thread-safe."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LIBC: Final = ctypes.CDLL(None)

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


def leave_out(array: NDArray[Any]) -> None:
    """Of memory that numpy has made: the memory pages that are the array's alone. What is made
    there later, once the array is gone, is left out too. For arrays that come and go: mappings of
    their own would cost them the kernel's zeros. A kernel that refuses is no error."""
    begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTDUMP)
