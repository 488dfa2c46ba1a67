"""From segments into device memory, by kvikio: through GPUDirect Storage, or through kvikio's own
host buffers (its compatibility mode). Never into host memory: that needs a driver there and gains
nothing.

kvikio takes paths, no descriptors, and opens each file twice, so files stay open here, a bounded
number of them, recognised by device and inode: segments are recycled, not made anew. Thread-safe.

Source: kvikio 26.10, python/kvikio/kvikio/cufile.py and defaults.py.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from importlib import import_module
from typing import Any

from kvwarehouse.client.mover import Finished, HeldFile
from kvwarehouse.errors import UsageError

OPEN_FILES = 16
_TASK_BYTES = 4 << 20


class KvikioMover:
    def __init__(self, *, gds: bool, threads: int = 8, library: Any = None) -> None:
        """gds: cuFile, and an error where it does not work; else kvikio's compatibility mode. Only
        with gds=True after a probe in another process found that it works: cuFile can spin for
        ever.

        library: in place of the module kvikio. Settings of kvikio are its process's. Raises
        UsageError (code "missing_extra") where it is not installed."""
        self.name = "kvikio (GDS)" if gds else "kvikio (compat)"
        self._kvikio = library or _kvikio()
        mode = self._kvikio.CompatMode.OFF if gds else self._kvikio.CompatMode.ON
        self._kvikio.defaults.set(
            {"compat_mode": mode, "num_threads": threads, "task_size": _TASK_BYTES}
        )
        self._files: OrderedDict[tuple[int, int], _Open] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, file: HeldFile, offset_bytes: int, target: Any) -> Finished:
        size_bytes = _size_bytes(target)
        opened = self._acquire(file)
        try:
            future = opened.handle.pread(target, size=size_bytes, file_offset=offset_bytes)
        except BaseException:
            self._release(opened)
            raise

        def finished() -> None:
            try:
                got = future.get()
            finally:
                self._release(opened)
            if got != size_bytes:
                raise OSError(f"{self.name} read {got} of {size_bytes} bytes")

        return finished

    def close(self) -> None:
        with self._lock:
            files, self._files = list(self._files.values()), OrderedDict()
        for opened in files:
            opened.handle.close()

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


def _size_bytes(target: Any) -> int:
    shape = target.__cuda_array_interface__["shape"]
    return int(shape[0])
