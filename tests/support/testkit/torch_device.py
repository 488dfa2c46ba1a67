"""The current GPU as an engine has it, by torch, which the caller imports: as ModelDevice of
cuda_model.py. Not thread-safe."""

from __future__ import annotations

from typing import Any

import numpy as np

SPIN_CYCLES = 100_000_000
"""Some hundredths of a second: whoever does not wait is early."""


class TorchDevice:
    """The current device, and an engine's stream on it."""

    streams = ("engine", "default")
    of_another_process = (
        "import torch\nfrom testkit.torch_device import TorchDevice\ndevice = TorchDevice(torch)"
    )

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._streams = {"engine": torch.cuda.Stream(), "default": torch.cuda.default_stream()}

    def array(self, data: Any) -> Any:
        return self._torch.from_numpy(np.array(data)).cuda()

    def read(self, array: Any) -> Any:
        # On the default stream, which the warehouse's streams do not wait for: the call that filled
        # `array` has returned, and that is all that is promised to be needed.
        return array.cpu().numpy()

    def free(self, array: Any) -> None:
        """torch does, by itself."""

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def current(self, stream: str) -> Any:
        return self._torch.cuda.stream(self._streams[stream])

    def queue_fill(
        self, array: Any, data: Any, stream: str = "engine", cycles: int = SPIN_CYCLES
    ) -> Any:
        host = self._torch.from_numpy(np.array(data)).pin_memory()
        event = self._torch.cuda.Event()
        with self.current(stream):
            self._torch.cuda._sleep(cycles)
            array.copy_(host, non_blocking=True)
            event.record(self._streams[stream])
        return event

    def happened(self, event: Any) -> bool:
        return bool(event.query())
