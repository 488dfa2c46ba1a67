"""How bytes get from a segment's file to a stage: the seam between held extents and what reads
them.

preadv for stages in host memory, kvikio for a device's.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib import import_module
from math import inf
from typing import Any, Protocol

from kvwarehouse.errors import UsageError
from kvwarehouse.gpu.driver import DeviceBytes
from kvwarehouse.gpu.pages import relaxed_capture_mode

OPEN_FILES = 16
_PART_BYTES = 4 << 20
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


class FileReader(Protocol):
    name: str
    """For people: "preadv", "kvikio (GDS)", ..."""

    def start(self, file: HeldFile, offset_bytes: int, target: Any) -> Finished:
        """Begins to fill `target`, a part of a stage, from `offset_bytes` of the file. Offset and
        size are multiples of 4096; so is the place of `target` in memory."""
        ...

    def close(self) -> None:
        """After every transfer has ended."""
        ...


class PreadReader:
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


class KvikioReader:
    """Into device memory, by kvikio: through GPUDirect Storage, or through kvikio's own host
    buffers (its compatibility mode). Never into host memory: that needs a driver there and gains
    nothing.

    kvikio takes paths, no descriptors, and opens each file twice, so files stay open here, a
    bounded number of them, recognised by device and inode: segments are recycled, not made anew.

    Every read is made by a thread of this class, aside of CUDA graphs that others capture, and none
    by kvikio's own threads, which are not. So it is raw_read, which works in the thread that calls
    it and wants the device's context there. cuFile is not ordered by CUDA's streams, so kvikio
    first waits for what the default stream has queued, an engine's work among it. Thread-safe.

    Source: kvikio 26.10, python/kvikio/kvikio/cufile.py, _lib/file_handle.pyx and defaults.py,
    cpp/src/file_handle.cpp and cpp/include/kvikio/detail/posix_io.hpp."""

    def __init__(self, *, gds: bool, threads: int = 8, library: Any = None) -> None:
        """gds: cuFile; else kvikio's compatibility mode. gds=True only after a probe in another
        process found that it works: cuFile can spin for ever, and what it cannot read straight it
        reads through host memory and says nothing (direct_cufile.py).

        library: in place of the module kvikio. Settings of kvikio are its process's. Raises
        UsageError (code "missing_extra") where it is not installed."""
        self.name = "kvikio (GDS)" if gds else "kvikio (compat)"
        self._kvikio = library or _kvikio()
        mode = self._kvikio.CompatMode.OFF if gds else self._kvikio.CompatMode.ON
        self._kvikio.defaults.set({"compat_mode": mode})
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvw-kvikio")
        self._files: OrderedDict[tuple[int, int], _Open] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, file: HeldFile, offset_bytes: int, target: Any) -> Finished:
        return end_of(
            [
                self._threads.submit(self._read, file, offset_bytes + at, part)
                for at, part in _parts(target)
            ]
        )

    def close(self) -> None:
        self._threads.shutdown()
        with self._lock:
            files, self._files = list(self._files.values()), OrderedDict()
        with relaxed_capture_mode():
            for opened in files:
                opened.handle.close()

    def _read(self, file: HeldFile, offset_bytes: int, part: DeviceBytes) -> None:
        size = part.size_bytes
        with relaxed_capture_mode(part.address):
            opened = self._acquire(file)
            try:
                got = opened.handle.raw_read(part, size=size, file_offset=offset_bytes)
            finally:
                self._release(opened)
        if got != size:
            raise OSError(f"{self.name} read {got} of {size} bytes")

    def _acquire(self, file: HeldFile) -> _Open:
        with self._lock:
            opened = self._files.get(file.identity)
            if opened is None:
                opened = _Open(self._kvikio.CuFile(file.path, "r"))
                self._files[file.identity] = opened
            self._files.move_to_end(file.identity)
            opened.users += 1
            self._close_idle()
            return opened

    def _release(self, opened: _Open) -> None:
        with self._lock:
            opened.users -= 1

    def _close_idle(self) -> None:
        """Least recently used first, down to the bound, as far as nobody reads from them."""
        for identity in list(self._files):
            if len(self._files) <= OPEN_FILES:
                return
            if self._files[identity].users == 0:
                self._files.pop(identity).handle.close()


class _Open:
    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.users = 0


def _parts(target: Any) -> Iterator[tuple[int, DeviceBytes]]:
    """Where in the target each begins, and its memory, which is the target's."""
    whole = target.__cuda_array_interface__
    (size_bytes,), address = whole["shape"], whole["data"][0]
    for at in range(0, size_bytes, _PART_BYTES):
        yield at, DeviceBytes(address + at, min(_PART_BYTES, size_bytes - at))


def _kvikio() -> Any:
    try:
        library = import_module("kvikio")
        import_module("kvikio.defaults")
    except ImportError as error:
        raise UsageError(
            f"kvikio cannot be imported ({error}); pip install 'kvwarehouse[gds]'",
            code="missing_extra",
        ) from error
    return library


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
