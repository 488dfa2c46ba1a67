"""Memory of a GPU as callers have it: arrays of torch, CuPy and others, and events of streams.

Stateless; thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvwarehouse.errors import UsageError


@dataclass(frozen=True)
class Place:
    """A device's ordinal, as CUDA counts them in this process, and the event that must have
    happened before its pages are read or written: a CUevent's address, 0 for none."""

    ordinal: int
    ready: int = 0


@dataclass(frozen=True)
class DeviceRows:
    """uint8 (count, page_bytes), C-contiguous, in device memory."""

    address: int
    count: int
    page_bytes: int


def on_device(pages: Any) -> bool:
    """Whether `pages` says that it lies in the memory of a GPU."""
    try:
        return isinstance(getattr(pages, "__cuda_array_interface__", None), dict)
    except (AttributeError, RuntimeError):  # torch raises on some tensors of other devices
        return False


def device_rows(array: Any, page_bytes: int | None, *, writable: bool) -> DeviceRows:
    """What `__cuda_array_interface__` (numba's specification, version 2 and 3) says of the array.

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
    if strides is not None and shape[0] > 1 and tuple(strides) != (shape[1], 1):
        raise _bad(f"pages has strides {tuple(strides)}; expected {expected} (copy it first)")
    address, read_only = interface["data"]
    if writable and read_only:
        raise _bad(f"pages is read-only and the load writes to it; expected {expected}")
    return DeviceRows(int(address), int(shape[0]), int(shape[1]))


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
