"""The current GPU as an engine has it, by torch or CuPy, which the caller imports: as ModelDevice
of cuda_model.py. Not thread-safe."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

SPIN_CYCLES = 100_000_000
"""Some hundredths of a second: whoever does not wait is early."""

_SPIN: Final = """
extern "C" __global__ void spin(long long cycles) {
  const long long end = clock64() + cycles;
  while (clock64() < end) {
  }
}
"""


class TorchDevice:
    """The current device, and an engine's stream on it."""

    streams = ("engine", "default")
    of_another_process = (
        "import torch\nfrom testkit.gpu_devices import TorchDevice\ndevice = TorchDevice(torch)"
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


class CupyDevice:
    """The current device, and streams on it: one that the default stream does not wait for, the
    default one, and that of this thread."""

    of_another_process = (
        "import cupy\nfrom testkit.gpu_devices import CupyDevice\ndevice = CupyDevice(cupy)"
    )
    streams = ("engine", "default", "thread's")

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._streams = {
            "engine": cupy.cuda.Stream(non_blocking=True),
            "default": cupy.cuda.Stream.null,
            "thread's": cupy.cuda.Stream.ptds,
        }
        self._kernel = cupy.RawKernel(_SPIN, "spin")
        self.spin(1)  # compiles it: the next ones are only queued
        self._settle()

    def array(self, data: Any) -> Any:
        made = self._cupy.asarray(np.ascontiguousarray(data))
        self._settle()  # the engine's stream would not wait for it
        return made

    def read(self, array: Any) -> Any:
        # On the default stream, as TorchDevice does.
        return array.get()

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def current(self, stream: str) -> Any:
        return self._streams[stream]

    def spin(self, cycles: int = SPIN_CYCLES) -> None:
        """Queues it on the current stream."""
        self._kernel((1,), (1,), (np.int64(cycles),))

    def queue_fill(
        self, array: Any, data: Any, stream: str = "engine", cycles: int = SPIN_CYCLES
    ) -> Any:
        with self.current(stream):
            # Its memory goes back to the pool of this stream, which gives it away in its order.
            source = self._cupy.asarray(np.ascontiguousarray(data))
            self.spin(cycles)
            array.data.copy_from_device_async(source.data, array.nbytes)
            return self._streams[stream].record()

    def happened(self, event: Any) -> bool:
        return bool(event.done)

    def _settle(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()
