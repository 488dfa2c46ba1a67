"""Whether pages of a cache go straight between a GPU's memory and the arena, and why not where they
do not. What does not go straight goes through a buffer in host memory: slower, never wrong.

The answer changes once at most, from yes to no, and then says why in the log and counts. Asked for
by `device_copies`; thread-safe.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import kvwarehouse as kvw

_log = logging.getLogger(__name__)

WISHES = ("auto", "arena", "off")
"""auto: straight, and pages on NVMe by the lane that is the fastest; arena: straight, and all pages
by the daemon's arena; off: by a buffer in host memory."""

# What says that the way is not there, or not any more. Any other error is of a single call: after
# "gpu_capture" that load is a miss, because the host's way would break what is captured.
_REFUSALS = (
    "bad_device_memory",
    "bad_event",
    "bad_kernels",
    "gpu_error",
    "gpu_memory",
    "gpu_stalled",
    "no_gpu",
    "no_nvrtc",
    "unsupported",  # the daemon is on another host
)

# What a device that hangs may still write to; never taken out.
_kept: list[Any] = []


class EngineStream(Protocol):
    """The stream that the engine queues its work on. torch_stream.py has torch's."""

    @property
    def problem(self) -> str:
        """Why a device of this kind is not served, as what it is; "" where it may be."""
        ...

    def recorded(self) -> Any:
        """A new event behind all that the engine's stream has queued, as Regions.on_device takes
        it. In the engine's thread; never waits."""
        ...

    def gathered(self, pages: kvw.Regions, gather: kvw.gpu.DeviceGather) -> Any:
        """A copy of the pages in new memory of the device, uint8 (pages, page_bytes), queued on
        the engine's stream by one launch. In the engine's thread; never waits. Raises what
        out_of_memory knows."""
        ...

    def out_of_memory(self, error: RuntimeError) -> bool:
        """Whether that is what a tensor's operation raised."""
        ...


class DeviceCopies:
    """on_fallback: called once, when what would have gone straight no longer does. lane: how loads
    come here that may have pages on NVMe; None: all by the arena."""

    def __init__(
        self,
        ordinal: int,
        on_fallback: Callable[[], None],
        lane: kvw.gpu.AutoPath | None = None,
    ) -> None:
        self._ordinal = ordinal
        self._on_fallback = on_fallback
        self._lane = lane
        self._lock = threading.Lock()
        self._reason = ""

    @cached_property
    def gather(self) -> kvw.gpu.DeviceGather:
        """Made for the first that asks, before the engine serves: it loads kernels onto the device,
        and raises what DeviceGather does. In one thread."""
        return kvw.gpu.DeviceGather(self._ordinal)

    @property
    def usable(self) -> bool:
        return not self._reason

    @property
    def reason(self) -> str:
        """Why not; "" while they go straight."""
        return self._reason

    def placed(self, regions: kvw.Regions, after: Any) -> kvw.Regions:
        """The regions in the device's memory, which a call reads or writes after that event."""
        return regions.on_device(self._ordinal, after=after)

    def reached(self, event: Any, timeout_s: float) -> bool:
        """Whether the device came to the event within the time. In any thread: the event's own
        `query()` would break a graph that the engine captures meanwhile."""
        return kvw.gpu.wait_event(self._ordinal, event, timeout_s)

    def load(self, space: kvw.OpenNamespace, *args: Any, **how: Any) -> kvw.Loaded:
        """As space.load, into regions that were placed."""
        if self._lane is None:
            return space.load(*args, **how)
        return self._lane.load(space, *args, **how)

    def close(self) -> None:
        """Lets go of what loads from NVMe take of the device. Waits for nothing."""
        if self._lane is not None:
            self._lane.close()

    def refused(self, error: kvw.WarehouseError) -> bool:
        """Whether a call failed because the way is not there: then nobody goes it any more, and
        the caller may go through host memory at once. Raises the error where the device may still
        write to the call's pages."""
        if error.code not in _REFUSALS:
            return False
        self.give_up(str(error))
        if may_still_write(error):
            raise error
        return True

    def give_up(self, reason: str) -> None:
        with self._lock:
            if self._reason:
                return
            self._reason = reason
        tell(reason)
        self._on_fallback()
        self.close()


def device_copies(
    stream: EngineStream,
    address: int,
    wish: str,
    on_fallback: Callable[[], None],
    client: kvw.Client | None = None,
) -> DeviceCopies | None:
    """Of a cache on a device that has this address; None where its pages go through host memory,
    which is logged and counted unless it was wished. client: what will load and store, where there
    is one already. Blocks for a second."""
    assert wish in WISHES, wish
    if wish == "off":
        return None
    try:
        problem = stream.problem
        if not problem:
            ordinal = kvw.gpu.prepare(address, client)
            lane = kvw.gpu.AutoPath(ordinal) if wish == "auto" else None
            return DeviceCopies(ordinal, on_fallback, lane)
    except kvw.WarehouseError as error:
        problem = str(error)
    tell(problem)
    on_fallback()
    return None


def tell(reason: str) -> None:
    _log.warning("kvwarehouse: pages of the GPU go through a buffer in host memory: %s", reason)


def may_still_write(error: BaseException) -> bool:
    """Whether the device that a load failed on hangs: its pages are nobody's then, for as long as
    this process lives, because what was queued may reach them at any time."""
    return isinstance(error, kvw.WarehouseError) and error.code == "gpu_stalled"


def keep(memory: Any) -> None:
    """Never lets go of memory that a device may still write to."""
    _kept.append(memory)
