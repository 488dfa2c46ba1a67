"""In a process with torch: what it has loaded, and what another thread may call while torch
captures a graph, with its own mode relaxed as the clients have it."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from kvwarehouse_bench.gpu.facts.driver import (
    EVENT_DISABLE_TIMING,
    HOST_PORTABLE,
    MIB,
    READ_WRITE,
    STREAM_NON_BLOCKING,
    DriverCard,
    mapped,
    say,
)

_RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
_FILE_BYTES: Final = 2 * MIB
_COPY_PAUSE_S: Final = 0.05
"""For a copy to end before its memory is given up."""
_ELEMENTS: Final = 1 << 20


def captures(card: DriverCard) -> None:
    try:
        import torch
    except ModuleNotFoundError:
        say("torch is not here: nothing is captured")
        return
    say("torch", torch.__version__, torch.cuda.get_device_name())
    torch.ones(1, device="cuda").sum().item()
    maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
    say("nvrtc in this process", sorted({each.split()[-1] for each in maps if _is_told(each)}))
    data = torch.zeros(_ELEMENTS, device="cuda")
    result = data + 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    begun, found = threading.Event(), list[tuple[str, int]]()
    thread = threading.Thread(target=_beside, args=(card, begun, found), daemon=True)
    thread.start()
    with torch.cuda.graph(graph):
        result = data + 1
        begun.set()
        thread.join()
        result = result * 2
    graph.replay()
    torch.cuda.synchronize()
    say("beside a capture (relaxed):", found, "capture whole:", bool((result == 2).all()))


def _is_told(mapping: str) -> bool:
    return "nvrtc" in mapping or "cufile" in mapping


def _beside(card: DriverCard, begun: threading.Event, found: list[tuple[str, int]]) -> None:
    begun.wait()
    card.cuda.must("cuCtxSetCurrent", card.context)
    mode = ctypes.c_int(_RELAXED)
    card.cuda.ask("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, _FILE_BYTES)
        with mapped(file.fileno(), _FILE_BYTES, READ_WRITE) as address:
            for name, arguments in _calls(address):
                found.append((name, card.cuda.ask(name, *arguments)))
                if name == "cuEventQuery":
                    time.sleep(_COPY_PAUSE_S)


def _calls(address: int) -> list[tuple[str, tuple[Any, ...]]]:
    """In their order: what is made by one has its value when a later one is called."""
    stream, event, pinned = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    memory, size, file_size = ctypes.c_uint64(), ctypes.c_size_t(MIB), ctypes.c_size_t(_FILE_BYTES)
    host = ctypes.c_void_p(address)
    return [
        ("cuStreamCreate", (ctypes.byref(stream), STREAM_NON_BLOCKING)),
        ("cuEventCreate", (ctypes.byref(event), EVENT_DISABLE_TIMING)),
        ("cuMemAlloc_v2", (ctypes.byref(memory), size)),
        ("cuMemHostAlloc", (ctypes.byref(pinned), size, HOST_PORTABLE)),
        ("cuMemHostRegister_v2", (host, file_size, HOST_PORTABLE)),
        ("cuMemcpyHtoDAsync_v2", (memory, host, size, stream)),
        ("cuEventRecord", (event, stream)),
        ("cuEventQuery", (event,)),
        ("cuMemHostUnregister", (host,)),
        ("cuMemFree_v2", (memory,)),
    ]
