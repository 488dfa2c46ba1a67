"""Files in memory, at multiples of 2 MiB as the arena has them: Python's mmap takes no address."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvwarehouse_bench.gpu.facts.driver import MIB, say

READ: Final = mmap.PROT_READ
READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE

_HUGE_BYTES: Final = 2 * MIB
_PAGE_BYTES: Final = mmap.PAGESIZE
_NO_RIGHTS: Final = 0
"""PROT_NONE."""
# Linux's numbers; Python 3.11 has no names for them.
_MAP_FIXED: Final = 0x10
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@contextmanager
def mapped(file: int, size_bytes: int, rights: int, *, huge: bool = False) -> Iterator[int]:
    """The address of the file's first bytes, all of them there. `huge` says what became of asking
    for huge pages. Raises OSError."""
    room = size_bytes + _HUGE_BYTES
    base = _map(None, room, _NO_RIGHTS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        address = (base + _HUGE_BYTES - 1) // _HUGE_BYTES * _HUGE_BYTES
        _map(address, size_bytes, rights, mmap.MAP_SHARED | _MAP_FIXED, file)
        if huge:
            for offset in range(0, size_bytes, _HUGE_BYTES):
                _libc.madvise(address + offset, _PAGE_BYTES, _MADV_POPULATE_READ)
            say("MADV_COLLAPSE ->", _libc.madvise(address, size_bytes, _MADV_COLLAPSE))
        populate = _MADV_POPULATE_WRITE if rights == READ_WRITE else _MADV_POPULATE_READ
        _libc.madvise(address, size_bytes, populate)
        yield address
    finally:
        _libc.munmap(base, room)


def _map(address: int | None, size_bytes: int, rights: int, flags: int, file: int) -> int:
    made = _libc.mmap(address, size_bytes, rights, flags, file, 0)
    if made == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap of {size_bytes} bytes")
    return int(made)
