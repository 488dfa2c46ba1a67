"""Page buffers as callers have them: checked, and never copied.

Stateless; thread-safe.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.errors import UsageError

_DLPACK_CPU = 1
_DLPACK_PINNED = (3, 11)  # kDLCUDAHost, kDLROCMHost: host memory too


def page_rows(pages: Any, page_bytes: int | None, *, writable: bool) -> NDArray[np.uint8]:
    """`pages` as uint8 (n, page_bytes) that shares its memory: a numpy array, anything with the
    buffer protocol, a torch tensor on the CPU, or a DLPack exporter in host memory.

    page_bytes=None takes any width. Raises UsageError (code "bad_pages") naming expected and got:
    another dtype, shape or order, read-only where the call writes, memory of a device."""
    array = _shared(pages)
    width = "page_bytes" if page_bytes is None else page_bytes
    expected = f"uint8 of shape (n, {width}), C-contiguous" + (", writable" if writable else "")
    if array.dtype != np.uint8:
        raise _bad(f"pages is {array.dtype}; expected {expected} (view the bytes as uint8)")
    if array.ndim != 2 or (page_bytes is not None and array.shape[1] != page_bytes):
        raise _bad(f"pages has shape {array.shape}; expected {expected}")
    if not array.flags.c_contiguous:
        raise _bad(f"pages has strides {array.strides}; expected {expected} (copy it first)")
    if writable and not array.flags.writeable:
        raise _bad(f"pages is read-only and the load writes to it; expected {expected}")
    return array


def _shared(pages: Any) -> NDArray[Any]:
    if isinstance(pages, np.ndarray):
        return pages
    if type(pages).__module__.partition(".")[0] == "torch":
        return _of_torch(pages)
    try:
        return np.asarray(memoryview(pages))
    except TypeError:
        pass
    if hasattr(pages, "__dlpack__"):
        return _of_dlpack(pages)
    raise _bad(
        f"pages is of type {type(pages).__name__}, whose memory cannot be shared; pass a uint8"
        " array (n, page_bytes) or a kvwarehouse.Regions"
    )


def _of_torch(tensor: Any) -> NDArray[Any]:
    """numpy() shares the memory of a CPU tensor and refuses every other."""
    try:
        array: NDArray[Any] = tensor.detach().numpy()
    except Exception as error:  # torch's own TypeError or RuntimeError, not ours to tell apart
        raise _bad(f"pages is a tensor that cannot be read in host memory: {error}") from error
    return array


def _of_dlpack(exporter: Any) -> NDArray[Any]:
    device = exporter.__dlpack_device__()[0]
    if device != _DLPACK_CPU and device not in _DLPACK_PINNED:
        raise _bad("pages is in the memory of a device; copy it to host memory first")
    return np.from_dlpack(exporter)


def _bad(message: str) -> UsageError:
    return UsageError(message, code="bad_pages")
