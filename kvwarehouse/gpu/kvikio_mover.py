"""From segments into device memory, by kvikio: through GPUDirect Storage, or through kvikio's own
host buffers (its compatibility mode). Never into host memory: that needs a driver there and gains
nothing.

kvikio takes paths, no descriptors, and opens each file twice, so files stay open here, a bounded
number of them, recognised by device and inode: segments are recycled, not made anew.

Every read is made by a thread of this module, aside of CUDA graphs that others capture, and none by
kvikio's own threads, which are not. So it is raw_read, which works in the thread that calls it and
wants the device's context there. cuFile is not ordered by CUDA's streams, so kvikio first waits for
what the default stream has queued, an engine's work among it. Thread-safe.

Source: kvikio 26.10, python/kvikio/kvikio/cufile.py, _lib/file_handle.pyx and defaults.py,
cpp/src/file_handle.cpp and cpp/include/kvikio/detail/posix_io.hpp.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from kvwarehouse.errors import UsageError
from kvwarehouse.gpu.driver import DeviceMemory
from kvwarehouse.gpu.mover import Finished, HeldFile, end_of
from kvwarehouse.gpu.pages import captures_aside

OPEN_FILES = 16
_PART_BYTES = 4 << 20


class KvikioMover:
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
        with captures_aside():
            for opened in files:
                opened.handle.close()

    def _read(self, file: HeldFile, offset_bytes: int, part: DeviceMemory) -> None:
        size = part.size_bytes
        with captures_aside(part.address):
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


def _parts(target: Any) -> Iterator[tuple[int, DeviceMemory]]:
    """Where in the target each begins, and its memory, which is the target's."""
    whole = target.__cuda_array_interface__
    (size_bytes,), address = whole["shape"], whole["data"][0]
    for at in range(0, size_bytes, _PART_BYTES):
        yield at, DeviceMemory(address + at, min(_PART_BYTES, size_bytes - at))


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
