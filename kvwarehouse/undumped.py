"""Memory for KV on its way, which this process's core dumps leave out. Stateless; thread-safe."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LIBC: Final = ctypes.CDLL(None)


def leave_out(array: NDArray[Any]) -> None:
    """The memory pages that are the array's alone. What is made there later, once the array is
    gone, is left out too: of arrays that come and go a mapping of their own would cost the kernel's
    zeros. A kernel that refuses is no error."""
    begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTDUMP)
