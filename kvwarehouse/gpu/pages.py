"""What pages in the memory of a device need: the driver, and the kernels, compiled and loaded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from kvwarehouse.errors import UsageError

if TYPE_CHECKING:
    from kvwarehouse import core
    from kvwarehouse.client.client import Client
    from kvwarehouse.client.regions import Regions


def prepare(address: int, client: Client | None = None) -> int:
    """Makes ready what loads and stores of pages at `address`, in a device's memory, need, so that
    the first of them need not. Returns the device's ordinal, for `Regions.on_device`.

    client: a local one, for which the kernels are also loaded onto the device, and the memory taken
    that one load or store needs (53 MiB there, and as much pinned). That waits for what the device
    has queued, an engine's step among it: better before there is one.

    Blocks for a second the first time in a process. Raises UsageError: code "no_gpu" without a
    driver, "bad_device_memory" for an address that no device has, "no_nvrtc" without the compiler
    library; InternalError (code "bad_kernels") where that refuses the kernels."""
    from kvwarehouse import core
    from kvwarehouse.client.gpu.kernels import compiled
    from kvwarehouse.client.transport import shared_memory_of

    ordinal = int(core.device_of(address))
    compiled(*core.device_capability(ordinal))
    if client is not None and client.local:
        shared_memory_of(client).use_device(ordinal)
    return ordinal


class DeviceGather:
    """Copies pages of a device's memory into one run there, by one launch on an engine's stream:
    for blocks that will be written again before they are stored, and have a piece in each layer.

    The memory is the caller's, so that it comes from the framework's allocator and goes back to it
    in the order of that stream. Thread-safe. Blocks for a second the first time in a process, to
    compile; raises as prepare()."""

    def __init__(self, ordinal: int) -> None:
        from kvwarehouse import core
        from kvwarehouse.client.gpu.kernels import compiled

        self._ordinal = ordinal
        self._native = core.DeviceGather(ordinal, compiled(*core.device_capability(ordinal)))

    def plan(self, pages: Regions, to: int) -> core.GatherPlan:
        """Of a copy of the pages to `to`, an address of count * page_bytes bytes on the device.

        It tells the memory that it takes: `table_bytes` of pinned host memory, which write(address)
        fills, and `device_bytes` of the device's."""
        from kvwarehouse import core

        return core.GatherPlan(pages.on_device(self._ordinal).native(), to)

    def launch(self, plan: core.GatherPlan, tables: int, stream: int) -> None:
        """Queues the copy on the stream (a CUstream; 0, as torch says it, or 1 for CUDA's default
        one).

        tables: the address of device_bytes of device memory, 8-byte aligned, for nobody else until
        the copy is done; its first table_bytes are the plan's when the stream comes to it. Waits
        for nothing. Raises StorageError (code "gpu_error")."""
        from kvwarehouse.client.gpu.memory import driver_stream

        self._native.launch(plan, tables, driver_stream(stream))


def wait_event(ordinal: int, event: Any, timeout_s: float) -> bool:
    """Whether the device came to the event (as `Regions.on_device` takes it) within the time.

    For threads beside the engine's: unlike the event's own `query()` this breaks no CUDA graph that
    another thread captures. Blocks, and holds up no stream. Raises UsageError (code "bad_event"),
    StorageError (code "gpu_error")."""
    from kvwarehouse import core
    from kvwarehouse.client.gpu.memory import event_of

    return event is None or core.wait_event(ordinal, event_of(event), timeout_s)


def relaxed_capture_mode(address: int | None = None) -> AbstractContextManager[None]:
    """A with statement in which what this thread asks of a framework (torch) breaks no CUDA graph
    that another thread captures: allocations, copies and waits in a thread beside the engine's.

    address: in the memory of a device whose primary context is the thread's meanwhile, for
    libraries that expect one.

    For one use, in one thread. Where there is no driver of NVIDIA's it does nothing. Never raises
    without an address; with one, UsageError (code "bad_device_memory") where no device has it."""
    from kvwarehouse import core

    try:
        return core.RelaxedCaptureMode(address)
    except UsageError:
        return nullcontext()
