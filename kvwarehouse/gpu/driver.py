"""The few calls of the CUDA driver that probing and measuring need, by ctypes: neither CuPy nor
torch has to be there. For child processes (probe.py, path_benchmark_child.py): it makes the primary
context current.

Source: CUDA Driver API reference, cuda.h (names with _v2 are those that the header maps to).
"""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libcuda.so.1"

# CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, ..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_...
_SHARING = (102, 103)


class DriverError(RuntimeError):
    """A call of the driver failed; says which, and the driver's number."""


class Driver:
    def __init__(self) -> None:
        """Raises OSError where there is no driver, DriverError where it does not start."""
        self._library = ctypes.CDLL(LIBRARY)
        self._context = ctypes.c_void_p()
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise DriverError(f"{name} failed with error {result} of the CUDA driver")

    def version(self) -> str:
        """Of CUDA that the driver speaks: "13.0"."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def devices(self) -> list[str]:
        """Names, by number."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        names = []
        for number in range(count.value):
            text = ctypes.create_string_buffer(256)
            self.call("cuDeviceGetName", text, len(text), self._device(number))
            names.append(text.value.decode(errors="replace"))
        return names

    def shares_memory(self, number: int) -> bool:
        """Whether the device's memory can be mapped by other processes by a file descriptor."""
        value = ctypes.c_int()
        for attribute in _SHARING:
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device(number))
            if not value.value:
                return False
        return True

    def use(self, number: int) -> None:
        """Makes the device's primary context this thread's."""
        device = self._device(number)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()

    def enter(self) -> None:
        """Makes the context that was chosen by `use` this thread's too: threads have none."""
        self.call("cuCtxSetCurrent", self._context)

    def memory(self, size_bytes: int) -> DeviceBytes:
        """Until the process ends."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return DeviceBytes(address.value, size_bytes)

    def pinned(self, size_bytes: int) -> Any:
        """Page-locked host memory as a ctypes array, until the process ends."""
        address = ctypes.c_void_p()
        self.call("cuMemAllocHost_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        assert address.value is not None
        return (ctypes.c_uint8 * size_bytes).from_address(address.value)

    def to_device(self, memory: DeviceBytes, source: Any, size_bytes: int) -> None:
        """Blocks until the copy has ended."""
        self.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(memory.address),
            ctypes.c_void_p(ctypes.addressof(source)),
            ctypes.c_size_t(size_bytes),
        )

    def _device(self, number: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), number)
        return device


class DeviceBytes:
    """Bytes on a device, as other libraries take them."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address, self.size_bytes = address, size_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
