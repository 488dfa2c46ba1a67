"""The self-test of a host pool's layout, by a page of the engine's own pool, against what SGLang
itself reads and writes there.

Made once for each pool, in the thread that attaches it, with a page that the pool lends. The page
is left as it was: pools whose slots are those of another pool lend pages that may be in use.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse_connectors.core.self_test import layout_keeps_bytes
from kvwarehouse_connectors.sglang.memory import PAGE_UNIFIED, PieceMemory, unsupported


def layout_self_test(pool: Any, memory: PieceMemory) -> bool:
    """Whether it could be made: a full pool lends no page. Raises UsageError (code "unsupported")
    where other bytes come back."""
    lent = pool.alloc(memory.page_tokens)
    if lent is None:
        return False
    page = int(lent[0]) // memory.page_tokens
    before = _gather(memory, page)
    try:
        engine = _PoolPage(pool, page)
        good = engine.size_bytes == before.size and layout_keeps_bytes(
            engine, partial(_gather, memory, page), partial(_scatter, memory, page)
        )
    finally:
        _scatter(memory, page, before)  # it may be another page's, where addresses are wrong
        pool.free(lent)
    if not good:
        raise unsupported(pool, "gives other bytes back than were written to a page (self-test)")
    return True


class _PoolPage:
    """A page as SGLang reads and writes it."""

    def __init__(self, pool: Any, page: int) -> None:
        self._pool = pool
        self._page = page
        self._saved = self._read()
        seed = int.from_bytes(os.urandom(8), "little")
        self._noise = np.random.default_rng(seed).integers(0, 256, self._saved.shape, np.uint8)

    @property
    def size_bytes(self) -> int:
        return self._saved.size

    def write_noise(self) -> None:
        self._write(self._noise)

    def clear(self) -> None:
        self._write(np.zeros_like(self._noise))

    def hold_noise(self) -> bool:
        return np.array_equal(self._read(), self._noise)

    def restore(self) -> None:
        self._write(self._saved)

    def _read(self) -> NDArray[np.uint8]:
        if self._pool.layout == PAGE_UNIFIED:  # which SGLang reads by its address alone
            return _bytes(self._pool.kv_buffer[self._page]).copy()
        flat = self._pool.get_data_page(self._page * self._pool.page_size).contiguous()
        return _bytes(flat).copy()

    def _write(self, content: NDArray[np.uint8]) -> None:
        if self._pool.layout == PAGE_UNIFIED:
            _bytes(self._pool.kv_buffer[self._page])[:] = content
            return
        flat = self._pool.get_dummy_flat_data_page()
        _bytes(flat)[:] = content
        self._pool.set_from_flat_data_page(self._page * self._pool.page_size, flat)


def _scatter(memory: PieceMemory, page: int, rows: NDArray[np.uint8]) -> None:
    for part in range(memory.parts):
        memory.regions(np.array([page], np.int64), part).scatter(rows[part : part + 1])


def _gather(memory: PieceMemory, page: int) -> NDArray[np.uint8]:
    rows = np.empty((memory.parts, memory.part_bytes), np.uint8)
    for part in range(memory.parts):
        memory.regions(np.array([page], np.int64), part).gather(rows[part : part + 1])
    return rows


def _bytes(tensor: Any) -> NDArray[np.uint8]:
    """A contiguous tensor's memory, shared: valid while the caller keeps the tensor."""
    array = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(array)
