"""Measures one way from NVMe to a device: python -m kvwarehouse.gpu.path_benchmark_child PATH
DEVICE OFFSET:BYTES:FILE..."""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from kvwarehouse.gpu.direct_cufile import forbid_fallback, require_direct
from kvwarehouse.gpu.driver import DeviceBytes, Driver
from kvwarehouse.gpu.file_reader import FileReader, Finished, HeldFile, read_whole
from kvwarehouse.gpu.path_benchmark import DISK, LoadPath
from kvwarehouse.gpu.probe_process import report_steps

_PIECE_BYTES = 4 << 20
_DEPTH = 8
_ROUNDS = 3


class Piece(NamedTuple):
    path: str
    offset_bytes: int
    size_bytes: int


def pieces_of(arguments: Sequence[str]) -> list[Piece]:
    """Cut to what one transfer reads."""
    cut = []
    for argument in arguments:
        offset, size, path = argument.split(":", 2)
        begin, end = int(offset), int(offset) + int(size)
        for at in range(begin, end, _PIECE_BYTES):
            cut.append(Piece(path, at, min(_PIECE_BYTES, end - at)))
    return cut


def rate_of(pieces: Sequence[Piece], read_all: Callable[[], object]) -> float:
    """Median over rounds, bytes a second, the page cache dropped before each."""
    total = sum(piece.size_bytes for piece in pieces)
    found = []
    for _ in range(_ROUNDS):
        drop_cached({piece.path for piece in pieces})
        began = time.perf_counter()
        read_all()
        found.append(total / (time.perf_counter() - began))
    return statistics.median(found)


def drop_cached(files: Iterable[str | Path]) -> None:
    """What the page cache has of them, as far as it was written back."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _by_kvikio(pieces: Sequence[Piece], driver: Driver, *, gds: bool) -> float:
    from kvwarehouse.gpu.file_reader import KvikioReader

    if gds:
        forbid_fallback()
    targets = [driver.memory(_PIECE_BYTES) for _ in range(_DEPTH)]
    file_reader: FileReader = KvikioReader(gds=gds, threads=_DEPTH)
    files = {
        path: HeldFile(path, -1, False, (0, number))
        for number, path in enumerate(sorted({piece.path for piece in pieces}))
    }

    def read_all() -> None:
        under_way: list[Finished] = []
        for number, piece in enumerate(pieces):
            if len(under_way) == _DEPTH:
                under_way.pop(0)(inf)
            target = targets[number % _DEPTH]
            part = DeviceBytes(target.address, piece.size_bytes)
            under_way.append(file_reader.start(files[piece.path], piece.offset_bytes, part))
        for finished in under_way:
            finished(inf)

    rate = rate_of(pieces, read_all)
    if gds:
        require_direct()
    return rate


def _by_host(pieces: Sequence[Piece], driver: Driver | None) -> float:
    """As the daemon and the client do it together: direct reads into host memory, then a copy;
    without a driver the reads alone."""
    buffers: SimpleQueue[Any] = SimpleQueue()
    for _ in range(_DEPTH):
        buffers.put(driver.pinned(_PIECE_BYTES) if driver else mmap.mmap(-1, _PIECE_BYTES))
    memory = driver.memory(_PIECE_BYTES) if driver else None
    files = {path: _open(path) for path in {piece.path for piece in pieces}}

    def move(piece: Piece) -> None:
        """A piece is copied while others are read: the daemon promotes on while a client loads."""
        buffer = buffers.get()
        try:
            target = memoryview(buffer).cast("B")[: piece.size_bytes]
            read_whole(files[piece.path], target, piece.offset_bytes)
            if driver is not None and memory is not None:
                driver.to_device(memory, buffer, piece.size_bytes)
        finally:
            buffers.put(buffer)

    with ThreadPoolExecutor(_DEPTH, initializer=driver.enter if driver else None) as threads:
        return rate_of(pieces, lambda: deque(threads.map(move, pieces), maxlen=0))


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without direct I/O
        return os.open(path, os.O_RDONLY)


def main() -> None:
    path, ordinal, pieces = sys.argv[1], int(sys.argv[2]), pieces_of(sys.argv[3:])

    def rate() -> dict[str, Any]:
        if path == DISK:
            return {"bytes_per_s": _by_host(pieces, None)}
        driver = Driver()
        driver.use(ordinal)
        if path == LoadPath.DRAM:
            return {"bytes_per_s": _by_host(pieces, driver)}
        return {"bytes_per_s": _by_kvikio(pieces, driver, gds=path == LoadPath.GDS)}

    report_steps({"rate": rate})


if __name__ == "__main__":
    main()
