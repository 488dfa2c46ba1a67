"""How fast host memory goes to the device and back: in copies of one size after another, in one
stream and in two; and scattered, one by one and as batches."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from kvwarehouse_bench.gpu.facts.driver import KIB, MIB, DriverCard, say

_SIZES: Final = tuple(size * KIB for size in (16, 64, 128, 256, 512, 1024, 2048, 16 * 1024))
"""Those below the total, and one copy of all."""
_BATCH_SIZES: Final = tuple(size for size in _SIZES if size <= 2 * MIB)
_BATCH: Final = 64
"""Copies a call, as the client has them."""
_BATCH_CALL: Final = "cuMemcpyBatchAsync_v2"
"""Of CUDA 13.0; the symbol without the suffix has one parameter more."""
_ROUNDS: Final = 3
_IN_STREAM_ORDER: Final = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM."""
_BESIDE_KERNELS: Final = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""
_WORD_BYTES: Final = 8
_FILL: Final = 7
_SEED: Final = 1


@dataclass(frozen=True)
class _Way:
    call: str
    name: str
    to_device: bool

    def ends(self, device: int, host: int) -> tuple[int, int]:
        """Where to, and where from."""
        return (device, host) if self.to_device else (host, device)


_WAYS: Final = (
    _Way("cuMemcpyHtoDAsync_v2", "to the device", True),
    _Way("cuMemcpyDtoHAsync_v2", "to the host", False),
)


class _How(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


class _Lanes:
    """Streams, and an event for each."""

    def __init__(self, card: DriverCard, count: int) -> None:
        self._cuda = card.cuda
        self.streams = [card.stream() for _ in range(count)]
        self._events = [card.event() for _ in range(count)]

    def wait(self) -> None:
        """Until they have done what was queued."""
        for event, stream in zip(self._events, self.streams, strict=True):
            self._cuda.must("cuEventRecord", event, stream)
        for event in self._events:
            self._cuda.must("cuEventSynchronize", event)


@dataclass(frozen=True)
class _Buffers:
    """As much on the device as page-locked on the host."""

    device: int
    host: int
    size_bytes: int

    @classmethod
    @contextmanager
    def of(cls, card: DriverCard, size_bytes: int) -> Iterator[_Buffers]:
        """Freed at the end, when nothing may be under way to or from them; an error keeps them."""
        buffers = cls(card.memory(size_bytes), card.pinned(size_bytes), size_bytes)
        ctypes.memset(buffers.host, _FILL, size_bytes)
        yield buffers
        card.cuda.must("cuMemFreeHost", ctypes.c_void_p(buffers.host))
        card.cuda.must("cuMemFree_v2", ctypes.c_uint64(buffers.device))

    def in_order(self, way: _Way, size_bytes: int) -> list[tuple[int, int]]:
        """(to, from) of copies of that size."""
        offsets = range(0, self.size_bytes, size_bytes)
        return [way.ends(self.device + each, self.host + each) for each in offsets]

    def scattered(self, way: _Way, size_bytes: int) -> list[tuple[int, int]]:
        """Likewise; the copies, and their places at both ends, are in no order."""
        rng = random.Random(_SEED)
        devices = list(range(self.device, self.device + self.size_bytes, size_bytes))
        hosts = list(range(self.host, self.host + self.size_bytes, size_bytes))
        rng.shuffle(devices)
        rng.shuffle(hosts)
        return [way.ends(*each) for each in zip(devices, hosts, strict=True)]


def copies(card: DriverCard, total_bytes: int) -> None:
    """Of so many bytes each, a multiple of 2 MiB."""
    lanes = [_Lanes(card, count) for count in (1, 2)]
    with _Buffers.of(card, total_bytes) as buffers:
        for way in _WAYS:
            for size in (*(each for each in _SIZES if each < total_bytes), total_bytes):
                pairs = buffers.in_order(way, size)
                speeds = [
                    _speed(_one_by_one(card, way, pairs, size, each), each, len(pairs), total_bytes)
                    for each in lanes
                ]
                told = f"1 stream(s) {speeds[0]}; 2 stream(s) {speeds[1]}"
                say(way.call, size // KIB, "KiB:", told)


def batches(card: DriverCard, total_bytes: int) -> None:
    """Likewise."""
    if card.cuda.entry(_BATCH_CALL) is None:
        say(_BATCH_CALL, "is not in this driver")
        return
    lanes = _Lanes(card, 1)
    with _Buffers.of(card, total_bytes) as buffers:
        for way in _WAYS:
            for size in _BATCH_SIZES:
                pairs = buffers.scattered(way, size)
                queues = (
                    _together(card, pairs, size, lanes),
                    _one_by_one(card, way, pairs, size, lanes),
                )
                batch, single = (_speed(each, lanes, len(pairs), total_bytes) for each in queues)
                told = f"{batch}; one by one {single}"
                say(_BATCH_CALL, f"{way.name}, {size // KIB} KiB, {_BATCH} a call: {told}")


def _one_by_one(
    card: DriverCard, way: _Way, pairs: Sequence[tuple[int, int]], size_bytes: int, lanes: _Lanes
) -> Callable[[], int]:
    streams, size = lanes.streams, ctypes.c_size_t(size_bytes)
    calls = [
        (ctypes.c_uint64(to), ctypes.c_uint64(source), size, streams[number % len(streams)])
        for number, (to, source) in enumerate(pairs)
    ]
    return _queueing(card.cuda.entry(way.call), calls)


def _together(
    card: DriverCard, pairs: Sequence[tuple[int, int]], size_bytes: int, lanes: _Lanes
) -> Callable[[], int]:
    words = ctypes.c_uint64 * len(pairs)
    arrays = [words(*(each[end] for each in pairs)) for end in (0, 1)]
    arrays.append(words(*[size_bytes] * len(pairs)))
    how = _How(_IN_STREAM_ORDER, (ctypes.c_int * 4)(), _BESIDE_KERNELS)
    first, one = ctypes.c_size_t(0), ctypes.c_size_t(1)
    calls = [
        (
            *(ctypes.byref(array, begin * _WORD_BYTES) for array in arrays),
            ctypes.c_size_t(min(_BATCH, len(pairs) - begin)),
            ctypes.byref(how),
            ctypes.byref(first),
            one,
            lanes.streams[0],
        )
        for begin in range(0, len(pairs), _BATCH)
    ]
    return _queueing(card.cuda.entry(_BATCH_CALL), calls)


def _queueing(call: Any, calls: Sequence[tuple[Any, ...]]) -> Callable[[], int]:
    """What queues all of it, and returns the last result that is no success."""

    def queue() -> int:
        failed = 0
        for arguments in calls:
            failed = call(*arguments) or failed
        return failed

    return queue


def _speed(queue: Callable[[], int], lanes: _Lanes, count: int, total_bytes: int) -> str:
    """Of the fastest round; what queueing took is the last one's."""
    fastest_s = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        failed = queue()
        queued_s = time.perf_counter() - started
        lanes.wait()
        fastest_s = min(fastest_s, time.perf_counter() - started)
        if failed:
            return f"error {failed}"
    gb_s = total_bytes / fastest_s / 1e9
    return f"{gb_s:.1f} GB/s (queueing {queued_s / count * 1e6:.1f} us each)"
