"""The current GPU as an engine has it, by CuPy, which the caller imports: as TorchDevice of
torch_device.py. Not thread-safe."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from testkit.torch_device import SPIN_CYCLES

_SPIN: Final = """
extern "C" __global__ void spin(long long cycles) {
  const long long end = clock64() + cycles;
  while (clock64() < end) {
  }
}
"""


class CupyDevice:
    """The current device, and streams on it: one that the default stream does not wait for, the
    default one, and that of this thread."""

    of_another_process = (
        "import cupy\nfrom testkit.cupy_device import CupyDevice\ndevice = CupyDevice(cupy)"
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
