"""CUDA's driver by ctypes, a card that is open, and how a fact is said. Types and numbers are those
of NVIDIA's public "CUDA Driver API" reference. Not thread-safe, but for `Driver`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
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


class DriverError(Exception):
    """A call that had to succeed did not, or the driver is not there."""

    def __init__(self, text: str, result: int) -> None:
        super().__init__(text)
        self.result = result


class Driver:
    """Raises DriverError (result NO_DEVICE) where the library cannot be loaded."""

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(f"no CUDA driver: {error}", NO_DEVICE) from error

    def entry(self, name: str) -> Any:
        """The function itself, for what is called very often. None where the driver lacks it."""
        return getattr(self._library, name, None)

    def ask(self, name: str, *arguments: Any) -> int:
        """The call's CUresult. Raises AttributeError where the driver lacks the call."""
        return int(getattr(self._library, name)(*arguments))

    def must(self, name: str, *arguments: Any) -> None:
        result = self.ask(name, *arguments)
        if result != 0:
            raise DriverError(f"{name} -> {result}", result)


@dataclass(frozen=True)
class Card:
    """Device 0 with its primary context, which is current in the thread that opened it."""

    cuda: Driver
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
