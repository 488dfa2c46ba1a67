"""torch's current stream on a device, as device_copies.py wants it. Needs torch.

Used in the thread whose current stream is the engine's; the events may go to any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


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

    def indices(self, blocks: Sequence[int]) -> Any:
        # From pinned memory: a copy of other memory waits until the stream has made it.
        with torch.cuda.device(self._device):  # or it is pinned by a context on the first device
            held = torch.tensor(list(blocks), dtype=torch.int64).pin_memory()
            return held.to(self._device, non_blocking=True)

    def out_of_memory(self, error: RuntimeError) -> bool:
        return isinstance(error, torch.OutOfMemoryError)
