"""Measures one way from NVMe to a device: python -m kvwarehouse.gpu.rates_child LANE
OFFSET:BYTES:FILE..."""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvwarehouse.client.mover import HeldFile, Mover, read_whole
from kvwarehouse.gpu.driver import DeviceMemory, Driver
from kvwarehouse.gpu.rates import DISK, Lane
from kvwarehouse.gpu.telling import tell

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


def rate_of(pieces: Sequence[Piece], read_all: Callable[[], None]) -> float:
    """Median over rounds, bytes a second, the page cache dropped before each."""
    total = sum(piece.size_bytes for piece in pieces)
    found = []
    for _ in range(_ROUNDS):
        _drop(pieces)
        began = time.perf_counter()
        read_all()
        found.append(total / (time.perf_counter() - began))
    return statistics.median(found)


def _drop(pieces: Sequence[Piece]) -> None:
    for path in {piece.path for piece in pieces}:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _by_kvikio(pieces: Sequence[Piece], driver: Driver, *, gds: bool) -> float:
    from kvwarehouse.gpu.kvikio_mover import KvikioMover

    targets = [driver.memory(_PIECE_BYTES) for _ in range(_DEPTH)]
    mover: Mover = KvikioMover(gds=gds, threads=_DEPTH)
    files = {
        path: HeldFile(path, -1, False, (0, number))
        for number, path in enumerate(sorted({piece.path for piece in pieces}))
    }

    def read_all() -> None:
        under_way: list[Callable[[], None]] = []
        for number, piece in enumerate(pieces):
            if len(under_way) == _DEPTH:
                under_way.pop(0)()
            target = targets[number % _DEPTH]
            part = DeviceMemory(target.address, piece.size_bytes)
            under_way.append(mover.start(files[piece.path], piece.offset_bytes, part))
        for finished in under_way:
            finished()

    return rate_of(pieces, read_all)


def _by_host(pieces: Sequence[Piece], driver: Driver | None) -> float:
    """As the daemon and the client do it together: direct reads into host memory, then a copy;
    without a driver the reads alone."""
    if driver is None:
        buffers = [mmap.mmap(-1, _PIECE_BYTES) for _ in range(_DEPTH)]
    else:
        buffers = [driver.pinned(_PIECE_BYTES) for _ in range(_DEPTH)]
    memory = driver.memory(_PIECE_BYTES) if driver else None
    files = {path: _open(path) for path in {piece.path for piece in pieces}}

    def read(number: int) -> None:
        piece = pieces[number]
        target = memoryview(buffers[number % _DEPTH]).cast("B")[: piece.size_bytes]
        read_whole(files[piece.path], target, piece.offset_bytes)

    def read_all() -> None:
        for first in range(0, len(pieces), _DEPTH):
            batch = range(first, min(first + _DEPTH, len(pieces)))
            list(threads.map(read, batch))
            if driver is None or memory is None:
                continue
            for number in batch:
                driver.to_device(memory, buffers[number % _DEPTH], pieces[number].size_bytes)

    with ThreadPoolExecutor(_DEPTH) as threads:
        return rate_of(pieces, read_all)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without direct I/O
        return os.open(path, os.O_RDONLY)


def main() -> None:
    lane, pieces = sys.argv[1], pieces_of(sys.argv[2:])

    def rate() -> dict[str, Any]:
        if lane == DISK:
            return {"bytes_per_s": _by_host(pieces, None)}
        driver = Driver()
        driver.use(0)
        if lane == Lane.DRAM:
            return {"bytes_per_s": _by_host(pieces, driver)}
        return {"bytes_per_s": _by_kvikio(pieces, driver, gds=lane == Lane.GDS)}

    tell({"rate": rate})


if __name__ == "__main__":
    main()
