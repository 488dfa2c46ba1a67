"""A cache on a device: blocks go through a bounded buffer in host memory, on a stream of their own
that starts after the work the engine has queued so far. What waits for the device does so beside
the engine's own thread, and breaks no graph that is captured there.

Needs torch; memory.py says what its methods promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import kvwarehouse as kvw
from kvwarehouse_connectors.core.layout import by_memory
from kvwarehouse_connectors.core.memory import RowsOnly
from kvwarehouse_connectors.core.page_run import PageRun

_BUFFER_BYTES = 64 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeviceMemory(RowsOnly):
    """A cache on a device. views: each layer's tensor with the scheduler's blocks as dimension 0,
    in the group's order."""

    def __init__(self, views: Sequence[Any]) -> None:
        self._views = [by_memory(as_words(view)) for view in views]
        self._bytes = [view[0].numel() * view.element_size() for view in self._views]
        self._device = self._views[0].device
        self._streams = torch.accelerator if self._device.type != "cpu" else None
        self._out = self._stream()
        self._in = self._stream()

    @property
    def block_bytes(self) -> int:
        return sum(self._bytes)

    @property
    def takes_loads_at_once(self) -> bool:
        return False  # one stream, which each scatter waits for

    def gather(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        ids = torch.as_tensor(list(blocks), device=self._device)
        # In the engine's own stream, so that nothing writes the blocks before they are read.
        parts = [view.index_select(0, ids) for view in self._views]
        self._after_engine(self._out)
        with self._on(self._out):
            offset = 0
            for part, size in zip(parts, self._bytes, strict=True):
                rows = part.reshape(len(blocks), -1).view(torch.uint8)
                torch.from_numpy(out[:, offset : offset + size]).copy_(rows, non_blocking=True)
                if self._out is not None:
                    part.record_stream(self._out)
                offset += size

    def settle(self) -> None:
        if self._out is not None:
            with kvw.gpu.relaxed_capture_mode():
                self._out.synchronize()

    def load(
        self, space: kvw.OpenNamespace, run: PageRun, begin: int, shard: int, timeout_s: float
    ) -> kvw.Loaded:
        most = max(1, _BUFFER_BYTES // self.block_bytes)
        blocks = run.blocks[begin : begin + most]
        buffer = np.empty((len(blocks), self.block_bytes), np.uint8)
        runs = run.key_runs(begin)
        loaded = space.load(keys=runs, out=buffer, shard=shard, timeout_s=timeout_s)
        filled = int(loaded)
        if filled:
            self.scatter(blocks[:filled], buffer[:filled])
        if filled == len(blocks) and begin + filled < len(run.blocks):
            return kvw.Loaded(filled, {"timeout": len(run.blocks) - begin - filled})  # go on
        return loaded

    def scatter(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        if self._in is None:
            return self._scatter(blocks, rows)
        with kvw.gpu.relaxed_capture_mode():
            with self._in:
                self._scatter(blocks, rows)
            self._in.synchronize()

    def _scatter(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        ids = torch.as_tensor(list(blocks), device=self._device)
        offset = 0
        for view, size in zip(self._views, self._bytes, strict=True):
            part = torch.from_numpy(np.ascontiguousarray(rows[:, offset : offset + size]))
            shaped = part.to(self._device).view(view.dtype).view(len(blocks), *view.shape[1:])
            view.index_copy_(0, ids, shaped)
            offset += size

    def after_engine(self) -> None:
        self._after_engine(self._in)

    def _stream(self) -> Any:
        return torch.Stream(self._device) if self._streams is not None else None

    def _after_engine(self, stream: Any) -> None:
        if stream is not None:
            event = torch.Event(self._device)
            event.record(torch.accelerator.current_stream(self._device))
            stream.wait_event(event)

    def _on(self, stream: Any) -> Any:
        return _Nothing() if stream is None else stream


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *unused: object) -> None:
        return None


def as_words(view: Any) -> Any:
    """The view with whole numbers of the same width in place of its own type: torch does not select
    and copy every type by index, those of 8 bits not."""
    return view.view(_WORDS[view.element_size()]) if view.element_size() in _WORDS else view
