"""Memory of a GPU as callers have it: arrays of torch, CuPy and others, the streams that these are
computed on, and events of streams.

Stateless; thread-safe.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvwarehouse.errors import UsageError

_LEGACY_STREAM: Final = 1
"""CUDA's default stream, as `stream` of `__cuda_array_interface__` and the driver number it."""


@dataclass(frozen=True)
class Place:
    """A device's ordinal, as CUDA counts them in this process, and the events that must have
    happened before its pages are read or written: addresses of CUevents."""

    ordinal: int
    ready: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeviceRows:
    """uint8 (count, page_bytes), C-contiguous, in device memory."""

    address: int
    count: int
    page_bytes: int


def on_device(pages: Any) -> bool:
    """Whether `pages` says that it lies in the memory of a GPU."""
    return _interface_of(pages) is not None


def streams_of(arrays: Iterable[Any]) -> list[int]:
    """The streams that what the arrays hold is computed on, each once, as the driver takes them: of
    a tensor of torch this thread's current one, of others what they say (CuPy: likewise). An array
    that says none needs none.

    Raises UsageError (code "bad_stream") for what can be no stream."""
    # Only who has imported torch has a tensor of it.
    torch: Any = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", ())
    streams, devices = set(), set()
    for array in arrays:
        if isinstance(array, tensor):
            if array.is_cuda:
                devices.add(array.device)
        elif (interface := _interface_of(array)) is not None:
            stream = interface.get("stream")
            if stream is not None:
                streams.add(_checked_stream(stream))
    for device in devices:
        streams.add(driver_stream(torch.cuda.current_stream(device).cuda_stream))
    return sorted(streams)


def driver_stream(stream: int) -> int:
    """A stream of torch's as the driver takes it: torch says 0 for CUDA's default one."""
    return int(stream) or _LEGACY_STREAM


def _checked_stream(stream: Any) -> int:
    if isinstance(stream, bool) or not isinstance(stream, int) or stream <= 0:
        raise UsageError(
            f"`stream` of the array's __cuda_array_interface__ is {stream!r}; it may be 1 (CUDA's"
            " default stream), 2 (this thread's own), a CUstream's address, or None where nothing"
            " has to be waited for; or give an event: Regions.rows(array).on_device(after=event)",
            code="bad_stream",
        )
    return stream


def _interface_of(array: Any) -> dict[str, Any] | None:
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
    except (AttributeError, RuntimeError):  # torch raises on some tensors of other devices
        return None
    return interface if isinstance(interface, dict) else None


def device_rows(array: Any, page_bytes: int | None, *, writable: bool) -> DeviceRows:
    """What `__cuda_array_interface__` (numba's specification, version 2 and 3) says of the array;
    of its stream see streams_of.

    page_bytes=None takes any width. Raises UsageError (code "bad_pages") as rows in host memory
    do."""
    interface = array.__cuda_array_interface__
    width = "page_bytes" if page_bytes is None else page_bytes
    expected = f"uint8 of shape (n, {width}), C-contiguous" + (", writable" if writable else "")
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    if interface["typestr"] not in ("|u1", "<u1", "u1"):
        raise _bad(
            f"pages is {interface['typestr']}; expected {expected} (view the bytes as uint8)"
        )
    if len(shape) != 2 or (page_bytes is not None and shape[1] != page_bytes):
        raise _bad(f"pages has shape {shape}; expected {expected}")
    if strides is not None and not _contiguous(shape, strides):
        raise _bad(f"pages has strides {tuple(strides)}; expected {expected} (copy it first)")
    address, read_only = interface["data"]
    if writable and read_only:
        raise _bad(f"pages is read-only and the load writes to it; expected {expected}")
    return DeviceRows(int(address), int(shape[0]), int(shape[1]))


def _contiguous(shape: tuple[int, ...], strides: Any) -> bool:
    """Rows of bytes one behind another; the stride of an axis of one element says nothing."""
    rows, width = shape
    if rows == 0:
        return True
    return (rows == 1 or strides[0] == width) and (width == 1 or strides[1] == 1)


def event_of(event: Any) -> int:
    """The address of a CUevent: of torch.cuda.Event, of cupy.cuda.Event, or itself; 0 of None.

    Raises UsageError (code "bad_event"), also for an event that torch has not recorded yet, which
    has none."""
    if event is None:
        return 0
    for name in ("cuda_event", "ptr"):
        event = getattr(event, name, event)
    if isinstance(event, bool) or not isinstance(event, int) or event <= 0:
        raise UsageError(
            f"the event is {event!r}; pass a recorded torch.cuda.Event, a cupy.cuda.Event or the"
            " address of a CUevent",
            code="bad_event",
        )
    return event


def _bad(message: str) -> UsageError:
    return UsageError(message, code="bad_pages")
