"""Stand-ins for torch's tensors, stream and events on the device of the contract model of CUDA's
driver: as much of them as connectors use. They are contract models too:

 - what a tensor's operations copy is queued on the engine's stream, behind what it has to do;
 - memory that a tensor lets go of is overwritten in the order of that stream, as torch's allocator
   may give it away at once: whoever still reads it on another stream reads something else.

Tensors share memory as torch's views do. An event may be asked in any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import kvwarehouse as kvw
from testkit.cuda_model import ModelDevice

_JUNK_BYTES: Final = 1 << 20
_WORD_BYTES: Final = 8
# Copies, each with a pause now and then (model.h, pause_us).
_WORK: Final = 1000


class ModelMemory:
    """An allocation of torch's: bytes of the device, as long as a tensor has them."""

    def __init__(self, device: ModelDevice, size_bytes: int) -> None:
        self.device = device
        self.size_bytes = size_bytes
        self.address = device.allocate(size_bytes)
        self._junk = _junk_of(device)

    def __del__(self) -> None:
        for begin in range(0, self.size_bytes, _JUNK_BYTES):
            size = min(_JUNK_BYTES, self.size_bytes - begin)
            self.device.queue_copy(self.address + begin, self._junk, size)

    @property
    def data(self) -> NDArray[np.uint8]:
        """All bytes as they are now."""
        return self.device.peek(self.address, self.size_bytes)

    def fill(self, data: NDArray[np.uint8]) -> None:
        assert data.nbytes == self.size_bytes
        self.device.poke(self.address, data)

    def queue_fill(self, data: NDArray[np.uint8]) -> None:
        """As the engine's kernels write: queued on its stream, behind work that takes the model
        longer than a store or a load that does not wait."""
        for _ in range(_WORK):
            self.device.queue_copy(self._junk, self._junk + _WORD_BYTES, _WORD_BYTES)
        source = self.device.allocate(self.size_bytes)
        self.device.poke(source, data)
        self.device.queue_copy(self.address, source, self.size_bytes)


class ModelTensor:
    """shape and strides in elements of item_bytes, from `offset` elements of the memory on."""

    is_cuda = True

    def __init__(
        self,
        memory: ModelMemory,
        shape: Sequence[int],
        strides: Sequence[int],
        item_bytes: int,
        dtype: Any,
        offset: int = 0,
    ) -> None:
        self.memory = memory
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = SimpleNamespace(type="cuda", index=0)
        self._strides = tuple(strides)
        self._item_bytes = item_bytes
        self._offset = offset

    def data_ptr(self) -> int:
        return self.memory.address + self._offset * self._item_bytes

    def element_size(self) -> int:
        return self._item_bytes

    def numel(self) -> int:
        return int(np.prod(self.shape))

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dimension: int | None = None) -> Any:
        return self._strides if dimension is None else self._strides[dimension]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class ModelEvent:
    """As torch.cuda.Event, recorded."""

    def __init__(self, device: ModelDevice) -> None:
        self._device = device
        self.cuda_event = device.record()

    def query(self) -> bool:
        return self._device.happened(self.cuda_event)

    def __del__(self) -> None:
        self._device.forget(self.cuda_event)


class ModelStream:
    """The engine's stream, as connectors/kvwarehouse_connectors/core/device_copies.py wants it."""

    def __init__(self, device: ModelDevice, problem: str = "") -> None:
        self.problem = problem
        self.full = False
        """Whether the device has no memory for what is asked of it from now on."""
        self._device = device

    def recorded(self) -> ModelEvent:
        return ModelEvent(self._device)

    def gathered(self, pages: kvw.Regions, gather: kvw.gpu.DeviceGather) -> ModelTensor:
        if self.full:
            raise RuntimeError("out of memory")
        shape = (pages.count, pages.page_bytes)
        copy = ModelMemory(self._device, pages.count * pages.page_bytes)
        plan = gather.plan(pages, copy.address)
        tables = self._device.pinned(plan.table_bytes)
        plan.write(tables)
        held = ModelMemory(self._device, plan.device_bytes)
        self._device.queue_upload(held.address, tables, plan.table_bytes)
        gather.launch(plan, held.address, self._device.stream)
        return ModelTensor(copy, shape, contiguous(shape), 1, np.uint8)

    def out_of_memory(self, error: RuntimeError) -> bool:
        return str(error) == "out of memory"


_junk: dict[ModelDevice, int] = {}


def _junk_of(device: ModelDevice) -> int:
    if device not in _junk:
        _junk[device] = device.allocate(_JUNK_BYTES)
    return _junk[device]
