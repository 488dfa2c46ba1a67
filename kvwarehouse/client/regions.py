"""Where pages lie in the caller's memory: rows of one array, or pieces scattered over tensors, on
the host or on a GPU.

A Regions keeps its buffers alive. It may be used by many calls, one at a time for those that
write to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from kvwarehouse.client.buffers import page_rows
from kvwarehouse.client.gpu.memory import Place, device_rows, event_of, on_device, streams_of
from kvwarehouse.errors import UsageError

if TYPE_CHECKING:
    from kvwarehouse import core


class Regions:
    """Made by `rows` or `strided`; passed to load and store in place of an array."""

    count: int
    """Pages."""
    page_bytes: int
    """Bytes of each."""
    place: Place | None = None
    """Where they are in the memory of a GPU; None in host memory."""
    writable: bool = True
    """Whether a load may write to them."""

    def __init__(self, count: int, page_bytes: int) -> None:
        self.count = count
        self.page_bytes = page_bytes

    @staticmethod
    def rows(array: Any, *, writable: bool) -> Regions:
        """One page a row of `array`: uint8 (n, page_bytes), C-contiguous, in host memory, or on a
        GPU where it has `__cuda_array_interface__` (torch, CuPy); see on_device for its stream.
        writable=False: for stores; a load into them is a UsageError (code "read_only_buffer").

        Raises UsageError (code "bad_pages") naming what was expected and what was given."""
        return rows_of(array, None, writable=writable)

    @staticmethod
    def strided(
        owners: Sequence[Any],
        bases: Sequence[int] | NDArray[np.uint64],
        strides: Sequence[int] | NDArray[np.int64],
        piece_bytes: Sequence[int] | NDArray[np.uint64],
        blocks: Sequence[Sequence[int]] | NDArray[np.int64],
    ) -> StridedRegions:
        """Pages of a paged cache. Page p is, for each block b of blocks[p] in order and each piece
        j in order, the piece_bytes[j] bytes at address bases[j] + b * strides[j].

        bases, strides, piece_bytes: one a piece (usually one a layer and one for K and V each).
        blocks: (pages, blocks of a page). owners: the tensors the addresses point into, kept alive;
        the addresses themselves cannot be checked, so they must be right.

        Raises UsageError (code "bad_regions") on shapes that do not fit together."""
        return StridedRegions(
            list(owners),
            _integers("bases", bases, np.uint64, 1),
            _integers("strides", strides, np.int64, 1),
            _integers("piece_bytes", piece_bytes, np.uint64, 1),
            _integers("blocks", blocks, np.int64, 2),
        )

    def on_device(self, ordinal: int | None = None, *, after: Any = None) -> Regions:
        """The same pages, in the memory of a GPU.

        ordinal: the device as CUDA counts them in this process; None asks the driver. after: an
        event of the engine's stream (torch.cuda.Event, cupy.cuda.Event, or a CUevent's address)
        that must have happened before the pages are read or written; it is kept alive. None: what
        the stream of the pages' arrays has queued when a call is made, in the thread that makes it;
        that is torch's current stream for its tensors, `stream` of `__cuda_array_interface__` for
        others (CuPy: the current one), and none for arrays that name none. A call waits for that
        without holding up any stream, at most its timeout_s, and when the call returns its copies
        are done: no other synchronisation is needed, on any stream.

        Needs a client on the daemon's host. Raises UsageError: code "no_gpu" where there is no
        driver, "bad_device_memory" for addresses that no device has, "bad_event",
        "bad_regions" for rows in host memory. A call raises it with code "bad_stream" where the
        arrays name a stream of another device, or none that can be one; CapacityError (code
        "gpu_capture") where a graph is captured on their stream, or on one beside which CUDA's
        default stream, if it is theirs, cannot be used."""
        raise UsageError("these pages are in host memory", code="bad_regions")

    def behind_streams(self) -> Self:
        """The same pages for one call that is made now: where they are on a device and nothing
        says after what, behind what the streams of their arrays have queued."""
        return self

    def head(self, pages: int) -> Self:
        """The first `pages` of it."""
        return self.part(0, pages)

    def part(self, first: int, pages: int) -> Self:
        """`pages` of it from page `first` on, in the same memory."""
        raise NotImplementedError

    def gather(self, out: Any) -> None:
        """Copies all pages to `out`: uint8 (count, page_bytes), C-contiguous, writable, in host
        memory and not overlapping them. Releases the GIL.

        Raises UsageError (code "bad_pages") on any other shape."""
        self.native().gather(self._fitting(out, writable=True))

    def scatter(self, rows: Any) -> None:
        """Overwrites all pages with `rows`, as `gather` fills them. Releases the GIL.

        Raises UsageError (code "bad_pages") on any other shape, (code "bad_buffer") where the pages
        are not writable."""
        self.native().scatter(self._fitting(rows, writable=False))

    def _fitting(self, rows: Any, *, writable: bool) -> NDArray[np.uint8]:
        array = page_rows(rows, self.page_bytes, writable=writable)
        if len(array) != self.count:
            raise UsageError(
                f"the array has {len(array)} rows and the regions {self.count} pages; pass one row"
                " for each",
                code="bad_pages",
            )
        return array

    def native(self) -> core.Regions:
        """The form the native client takes."""
        raise NotImplementedError

    def flat(self) -> memoryview | None:
        """All pages as one run of bytes that shares their memory; None where they are not one."""
        return None

    def read(self, page: int) -> memoryview:
        """The bytes of a page; a view where it is contiguous, else a copy."""
        raise NotImplementedError

    def write(self, page: int, data: memoryview) -> None:
        """Overwrites a page; `data` has page_bytes bytes."""
        raise NotImplementedError


def rows_of(array: Any, page_bytes: int | None, *, writable: bool) -> Regions:
    """Rows of an array on the host or on a GPU; page_bytes=None takes any width.

    Raises UsageError (code "bad_pages")."""
    if not on_device(array):
        return RowRegions(page_rows(array, page_bytes, writable=writable), writable)
    rows = device_rows(array, page_bytes, writable=writable)
    made = Regions.strided(
        [array],
        [rows.address],
        [rows.page_bytes],
        [rows.page_bytes],
        np.arange(rows.count, dtype=np.int64).reshape(-1, 1),
    )
    made.writable = writable
    return made.on_device()


class RowRegions(Regions):
    """Pages in the rows of one array."""

    def __init__(self, array: NDArray[np.uint8], writable: bool) -> None:
        super().__init__(*array.shape)
        self._array = array
        self.writable = writable

    def part(self, first: int, pages: int) -> Self:
        if pages == self.count:
            return self
        return type(self)(self._array[first : first + pages], self.writable)

    def native(self) -> core.Regions:
        from kvwarehouse import core

        return core.Regions.pages(self._array, self.writable)

    def flat(self) -> memoryview | None:
        return self._array.reshape(-1).data

    def read(self, page: int) -> memoryview:
        return memoryview(self._array[page])

    def write(self, page: int, data: memoryview) -> None:
        self._array[page] = np.frombuffer(data, np.uint8)


class StridedRegions(Regions):
    """Pages in pieces. The native client gathers them; this one, for remote clients, piece by
    piece in Python, which suits pieces of kilobytes."""

    def __init__(
        self,
        owners: list[Any],
        bases: NDArray[np.uint64],
        strides: NDArray[np.int64],
        piece_bytes: NDArray[np.uint64],
        blocks: NDArray[np.int64],
    ) -> None:
        if not len(bases) == len(strides) == len(piece_bytes) >= 1 or blocks.shape[1] < 1:
            raise UsageError(
                f"regions: {len(bases)} bases, {len(strides)} strides, {len(piece_bytes)} pieces"
                f" and blocks of shape {blocks.shape}; give one of each of the first three per"
                " piece, and at least one block a page",
                code="bad_regions",
            )
        super().__init__(blocks.shape[0], int(piece_bytes.sum()) * blocks.shape[1])
        self._owners = owners
        self._bases, self._strides = bases, strides
        self._piece_bytes, self._blocks = piece_bytes, blocks

    def on_device(self, ordinal: int | None = None, *, after: Any = None) -> StridedRegions:
        from kvwarehouse import core

        event = event_of(after)
        if ordinal is None:
            if not self.count:
                return self  # an array without rows has no memory, so no device has its address
            ordinal = core.device_of(int(self._bases[0]))
        return self._placed(Place(int(ordinal), (event,) if event else ()), after)

    def behind_streams(self) -> Self:
        if self.place is None or self.place.ready:
            return self
        streams = streams_of(self._owners)
        if not streams:
            return self
        from kvwarehouse import core

        recorded = core.Recorded(self.place.ordinal, streams)
        return self._placed(Place(self.place.ordinal, tuple(recorded.events)), recorded)

    def _placed(self, place: Place, kept: Any) -> Self:
        """kept: what the place's events live as long as."""
        made = self._with(self._blocks)
        made.place = place
        made._owners = [*self._owners, kept]
        return made

    def part(self, first: int, pages: int) -> Self:
        return self._with(self._blocks[first : first + pages])

    def _with(self, blocks: NDArray[np.int64]) -> Self:
        made = type(self)(self._owners, self._bases, self._strides, self._piece_bytes, blocks)
        made.place, made.writable = self.place, self.writable
        return made

    def native(self) -> core.Regions:
        from kvwarehouse import core

        made = core.Regions.strided(
            self._owners, self._bases, self._strides, self._piece_bytes, self._blocks
        )
        if self.place is None:
            return made
        return made.on_device(self.place.ordinal, list(self.place.ready))

    def read(self, page: int) -> memoryview:
        return memoryview(
            b"".join(ctypes.string_at(address, size) for address, size in self._pieces(page))
        )

    def write(self, page: int, data: memoryview) -> None:
        offset = 0
        for address, size in self._pieces(page):
            ctypes.memmove(address, bytes(data[offset : offset + size]), size)
            offset += size

    def _pieces(self, page: int) -> list[tuple[int, int]]:
        refuse_device(self)
        sizes = [int(size) for size in self._piece_bytes]
        pieces = []
        for block in self._blocks[page]:
            for base, stride, size in zip(self._bases, self._strides, sizes, strict=True):
                pieces.append((int(base) + int(block) * int(stride), size))
        return pieces


def refuse_device(pages: Regions) -> None:
    """Raises UsageError (code "unsupported") unless they are in host memory."""
    if pages.place is not None:
        raise UsageError(
            f"the pages are in the memory of device {pages.place.ordinal}, which only a client"
            " on the daemon's host can reach; connect by its unix:// address, or copy them to"
            " host memory",
            code="unsupported",
        )


def _integers(name: str, values: Any, dtype: Any, dimensions: int) -> NDArray[Any]:
    try:
        array = np.asarray(values)
        if array.ndim == dimensions and array.dtype.kind in "iu":
            return np.ascontiguousarray(array, dtype)
        shown = f"{array.dtype} of shape {array.shape}"
    except (ValueError, TypeError, OverflowError) as error:
        shown = str(error)
    raise UsageError(
        f"regions: {name} is {shown}; pass integers of {dimensions} dimension(s)",
        code="bad_regions",
    )
