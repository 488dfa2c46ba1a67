"""What the device is, what its calls take, and what they do in a thread without a context."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from typing import Final

from kvwarehouse_bench.gpu.facts.driver import MIB, CudaDriver, DriverCard, say, timed

_ATTRIBUTES: Final = {
    75: "major",
    76: "minor",
    41: "unified addressing",
    16: "SMs",
    40: "copy engines",
    88: "pageable access",
    91: "host pointer of registered memory",
    99: "host register",
    100: "host page tables",
    102: "VMM",
    103: "POSIX fd",
    116: "GPUDirect RDMA",
    113: "READ-ONLY host register",
    115: "memory pools",
    124: "dma-buf",
}
"""CU_DEVICE_ATTRIBUTE_..."""
_MEMORY_TYPE: Final = 2
_DEVICE_ORDINAL: Final = 9
"""CU_POINTER_ATTRIBUTE_..."""
_ALLOCATED_BYTES: Final = 16 * MIB
_QUERIES: Final = 2000
_EVENT_PAUSE_S: Final = 0.01


def opened(cuda: CudaDriver) -> DriverCard:
    """Device 0. Raises CudaDriverError."""
    version, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    cuda.must("cuInit", 0)
    cuda.must("cuDriverGetVersion", ctypes.byref(version))
    cuda.must("cuDeviceGet", ctypes.byref(device), 0)
    took_us, _ = timed(lambda: cuda.must("cuDevicePrimaryCtxRetain", ctypes.byref(context), device))
    cuda.must("cuCtxSetCurrent", context)
    say("driver", version.value, "context", f"{took_us / 1e3:.0f} ms")
    return DriverCard(cuda, device, context)


def attributes(card: DriverCard) -> None:
    for number, name in _ATTRIBUTES.items():
        value = ctypes.c_int(-1)
        result = card.cuda.ask("cuDeviceGetAttribute", ctypes.byref(value), number, card.device)
        say("attribute", number, name, "=", f"error {result}" if result else value.value)


def calls(card: DriverCard) -> None:
    """What allocating and looking at an event take."""
    stream, event = card.stream(), card.event()
    took_us, _ = timed(lambda: card.memory(_ALLOCATED_BYTES))
    say("cuMemAlloc 16 MiB", f"{took_us:.0f} us")
    card.cuda.must("cuEventRecord", event, stream)
    time.sleep(_EVENT_PAUSE_S)
    took_us, _ = timed(lambda: card.cuda.ask("cuEventQuery", event), _QUERIES)
    say("cuEventQuery (by ctypes)", f"{took_us:.2f} us")
    took_us, host = timed(lambda: card.pinned(_ALLOCATED_BYTES))
    aligned = "page aligned" if host % mmap.PAGESIZE == 0 else "NOT page aligned"
    say("cuMemHostAlloc 16 MiB", f"{took_us:.0f} us", aligned)


def contexts(card: DriverCard) -> None:
    """What a new thread may ask before it has a context, and what popping leaves behind."""
    memory = ctypes.c_uint64(card.memory(MIB))
    cuda, found = card.cuda, list[tuple[object, ...]]()

    def new_thread() -> None:
        kind, ordinal, left = ctypes.c_uint(), ctypes.c_int(-1), ctypes.c_void_p()
        of_kind = cuda.ask("cuPointerGetAttribute", ctypes.byref(kind), _MEMORY_TYPE, memory)
        of_device = cuda.ask(
            "cuPointerGetAttribute", ctypes.byref(ordinal), _DEVICE_ORDINAL, memory
        )
        name = "pointer attributes without a context"
        found.append((name, of_kind, kind.value, of_device, ordinal.value))
        cuda.ask("cuCtxPushCurrent_v2", card.context)
        found.append(("pop(NULL)", cuda.ask("cuCtxPopCurrent_v2", None)))
        cuda.ask("cuCtxGetCurrent", ctypes.byref(left))
        found.append(("left over", left.value))

    thread = threading.Thread(target=new_thread)
    thread.start()
    thread.join()
    say(*found)
