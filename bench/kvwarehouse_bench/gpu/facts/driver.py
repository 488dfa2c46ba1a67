"""CUDA's driver by ctypes, a card that is open, how a fact is said, and files in memory at
multiples of 2 MiB as the arena has them: Python's mmap takes no address. Types and numbers are
those of NVIDIA's public "CUDA Driver API" reference. Not thread-safe, but for `Driver`.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

KIB: Final = 1 << 10
MIB: Final = 1 << 20

NO_DEVICE: Final = 100
"""CUDA_ERROR_NO_DEVICE."""
STUB_LIBRARY: Final = 34
"""CUDA_ERROR_STUB_LIBRARY: what is there to link against, and no driver."""
STREAM_NON_BLOCKING: Final = 1
EVENT_DISABLE_TIMING: Final = 2
HOST_PORTABLE: Final = 1
"""CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTREGISTER_PORTABLE."""
REGISTER_READ_ONLY: Final = 8

_Made = TypeVar("_Made")

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


class CudaDriverError(Exception):
    """A call that had to succeed did not, or the driver is not there."""

    def __init__(self, text: str, result: int) -> None:
        super().__init__(text)
        self.result = result


class CudaDriver:
    """Raises CudaDriverError (result NO_DEVICE) where the library cannot be loaded."""

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaDriverError(f"no CUDA driver: {error}", NO_DEVICE) from error

    def entry(self, name: str) -> Any:
        """The function itself, for what is called very often. None where the driver lacks it."""
        return getattr(self._library, name, None)

    def ask(self, name: str, *arguments: Any) -> int:
        """The call's CUresult. Raises AttributeError where the driver lacks the call."""
        return int(getattr(self._library, name)(*arguments))

    def must(self, name: str, *arguments: Any) -> None:
        result = self.ask(name, *arguments)
        if result != 0:
            raise CudaDriverError(f"{name} -> {result}", result)


@dataclass(frozen=True)
class DriverCard:
    """Device 0 with its primary context, which is current in the thread that opened it."""

    cuda: CudaDriver
    device: ctypes.c_int
    context: ctypes.c_void_p

    def stream(self) -> ctypes.c_void_p:
        """Lives as long as the process, as do all that follow."""
        made = ctypes.c_void_p()
        self.cuda.must("cuStreamCreate", ctypes.byref(made), STREAM_NON_BLOCKING)
        return made

    def event(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self.cuda.must("cuEventCreate", ctypes.byref(made), EVENT_DISABLE_TIMING)
        return made

    def memory(self, size_bytes: int) -> int:
        """The address of device memory."""
        made = ctypes.c_uint64()
        self.cuda.must("cuMemAlloc_v2", ctypes.byref(made), ctypes.c_size_t(size_bytes))
        return made.value

    def pinned(self, size_bytes: int) -> int:
        """The address of page-locked host memory."""
        made = ctypes.c_void_p()
        size = ctypes.c_size_t(size_bytes)
        self.cuda.must("cuMemHostAlloc", ctypes.byref(made), size, HOST_PORTABLE)
        return int(made.value or 0)


def timed(action: Callable[[], _Made], times: int = 1) -> tuple[float, _Made]:
    """Microseconds of a call, and what the last one returned."""
    started = time.perf_counter()
    for _ in range(times):
        made = action()
    return (time.perf_counter() - started) * 1e6 / times, made


def say(*words: object) -> None:
    """A line, at once: what comes next may not end."""
    print("FACT", *words, flush=True)


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
