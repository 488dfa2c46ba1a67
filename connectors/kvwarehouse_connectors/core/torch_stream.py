"""torch's current stream on a device, as device_copies.py wants it. Needs torch.

Used in the thread whose current stream is the engine's; the events may go to any.
"""

from __future__ import annotations

from typing import Any

import torch

import kvwarehouse as kvw


class TorchStream:
    """device: a torch.device that is not the CPU."""

    def __init__(self, device: Any) -> None:
        self._device = device

    @property
    def problem(self) -> str:
        if self._device.type != "cuda":
            return f"a device of type {self._device.type} is served so, only CUDA's go straight"
        if torch.version.cuda is None:
            return "torch is built for ROCm here, only CUDA's devices go straight"
        return ""

    def recorded(self) -> Any:
        # torch.Event, which is every device's, does not tell the address of its CUevent.
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream())
        return event

    def gathered(self, pages: kvw.Regions, gather: kvw.gpu.DeviceGather) -> Any:
        def empty(*shape: int, **how: Any) -> Any:
            return torch.empty(shape, dtype=torch.uint8, **how)

        with torch.cuda.device(self._device):  # or it is pinned by a context on the first device
            copy = empty(pages.count, pages.page_bytes, device=self._device)
            plan = gather.plan(pages, copy.data_ptr())
            # Pinned: a copy of other memory waits until the stream has made it. All of it goes back
            # to torch's allocators, which keep it until the stream has come that far.
            tables = empty(plan.table_bytes, pin_memory=True)
            plan.write(tables.data_ptr())
            held = empty(plan.device_bytes, device=self._device)
            held[: plan.table_bytes].copy_(tables, non_blocking=True)
            stream = torch.cuda.current_stream().cuda_stream
            gather.launch(plan, held.data_ptr(), stream)
        return copy

    def out_of_memory(self, error: RuntimeError) -> bool:
        return isinstance(error, torch.OutOfMemoryError)
