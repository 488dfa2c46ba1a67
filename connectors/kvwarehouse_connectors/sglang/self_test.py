"""The connector proves itself: known bytes go through a page of the engine's own host pool, both
ways, and are compared with what SGLang itself reads and writes there.

Done once for each pool, in the thread that attaches it, with a page that the pool lends. The page
is left as it was: pools whose slots are those of another pool lend pages that may be in use.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse_connectors.sglang.memory import PAGE_UNIFIED, PieceMemory, unsupported


def layout_self_test(pool: Any, memory: PieceMemory) -> bool:
    """Whether it could be tried: a full pool lends no page. Raises UsageError (code "unsupported")
    where other bytes come back."""
    lent = pool.alloc(memory.page_tokens)
    if lent is None:
        return False
    page = int(lent[0]) // memory.page_tokens
    before = _gather(memory, page)
    try:
        _both_ways(pool, memory, page)
    finally:
        _scatter(memory, page, before)
        pool.free(lent)
    return True


def _both_ways(pool: Any, memory: PieceMemory, page: int) -> None:
    written = _noise(memory)
    _scatter(memory, page, written)
    if not _same(_theirs(pool, page), written, memory):
        raise unsupported(pool, "reads other bytes than were written (self-test)")
    other = _noise(memory)
    _write_theirs(pool, page, other)
    if not _same(other.reshape(-1), _gather(memory, page), memory):
        raise unsupported(pool, "gives other bytes than it was written (self-test)")


def _scatter(memory: PieceMemory, page: int, rows: NDArray[np.uint8]) -> None:
    for part in range(memory.parts):
        memory.regions(np.array([page], np.int64), part).scatter(rows[part : part + 1])


def _gather(memory: PieceMemory, page: int) -> NDArray[np.uint8]:
    rows = np.empty((memory.parts, memory.part_bytes), np.uint8)
    for part in range(memory.parts):
        memory.regions(np.array([page], np.int64), part).gather(rows[part : part + 1])
    return rows


def _noise(memory: PieceMemory) -> NDArray[np.uint8]:
    """(parts, part_bytes)."""
    random = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    return random.integers(0, 256, (memory.parts, memory.part_bytes), np.uint8)


def _same(page: NDArray[np.uint8], rows: NDArray[np.uint8], memory: PieceMemory) -> bool:
    """Whether the parts' bytes, piece after piece, are those of SGLang's page: in the order of
    memory, or, of a pool of several tensors, each piece once."""
    if page.size != rows.size:
        return False
    pieces = []
    for part, row in enumerate(rows):
        ends = np.cumsum(memory.piece_bytes[part].astype(np.int64))
        cuts = np.split(row, ends[:-1])
        pieces += list(zip(memory.bases[part], cuts, strict=True))
    if memory.flat:
        pieces.sort(key=lambda piece: int(piece[0]))
        return bool((np.concatenate([cut for _, cut in pieces]) == page).all())
    whole = page.tobytes()
    return all(whole.count(cut.tobytes()) == 1 for _, cut in pieces)


def _theirs(pool: Any, page: int) -> NDArray[np.uint8]:
    """The page as SGLang reads it."""
    if pool.layout == PAGE_UNIFIED:  # which SGLang reads by its address alone
        return _bytes(pool.kv_buffer[page]).copy()
    flat = pool.get_data_page(page * pool.page_size).contiguous()
    return _bytes(flat).copy()


def _write_theirs(pool: Any, page: int, rows: NDArray[np.uint8]) -> None:
    if pool.layout == PAGE_UNIFIED:
        _bytes(pool.kv_buffer[page])[:] = rows.reshape(-1)
        return
    flat = pool.get_dummy_flat_data_page()
    _bytes(flat)[:] = rows.reshape(-1)
    pool.set_from_flat_data_page(page * pool.page_size, flat)


def _bytes(tensor: Any) -> NDArray[np.uint8]:
    """A contiguous tensor's memory, shared: valid while the caller keeps the tensor."""
    array = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(array)
