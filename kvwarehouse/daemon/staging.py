"""Memory for stores and loads over gRPC: bounded; refuses at the bound, never waits.

Thread-safe. A stream holds one buffer until it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.errors import CapacityError, UsageError
from kvwarehouse.sizes import format_size
from kvwarehouse.undumped import leave_out

BUFFER_BYTES: Final = 16 << 20
"""What one stream stages at a time, or one page if that is larger: 16 chunks deep."""


class Staging:
    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._streams = 0
        self._bytes = 0

    @property
    def streams(self) -> int:
        return self._streams

    @property
    def bytes(self) -> int:
        return self._bytes

    @contextmanager
    def buffer(self, page_bytes: int, pages: int) -> Iterator[NDArray[Any]]:
        """A uint8 buffer of (n, page_bytes), n from 1 to `pages`, for as long as the context lasts.

        Raises CapacityError when all memory is taken (retryable), UsageError when
        one page alone is over the bound."""
        if page_bytes > self.bytes_max:
            raise UsageError(
                f"a page of {format_size(page_bytes)} is over the staging memory of this daemon's "
                f"gRPC service, {format_size(self.bytes_max)}; use the local socket, or start the "
                "daemon with a larger --staging",
                code="page_too_large",
            )
        rows = max(1, min(pages, BUFFER_BYTES // page_bytes))
        self._take(rows * page_bytes)
        try:
            memory = np.empty((rows, page_bytes), np.uint8)
            leave_out(memory)
            yield memory
        finally:
            self._give(rows * page_bytes)

    def _take(self, size_bytes: int) -> None:
        with self._lock:
            if self._bytes + size_bytes > self.bytes_max:
                raise CapacityError(
                    f"{format_size(self._bytes)} of {format_size(self.bytes_max)} staging memory "
                    f"are taken and {format_size(size_bytes)} more are needed; try again later, or "
                    "start the daemon with a larger --staging",
                    code="staging_full",
                )
            self._streams += 1
            self._bytes += size_bytes

    def _give(self, size_bytes: int) -> None:
        with self._lock:
            self._streams -= 1
            self._bytes -= size_bytes
