"""The contract model of CUDA's driver (native/tests/cuda_model) for Python's tests: built, put in
the driver's place, and memory of its device as an engine has it. Not a GPU: what it shows is that
the driver's contract is kept.

    folder = build(tmp_path); monkeypatch.setenv(...) for each of environment(folder)
    device = ModelDevice(folder)

Not thread-safe.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_ROOT: Final = Path(__file__).parents[3]
_NATIVE: Final = _ROOT / "native"
_NO_DEVICE: Final = Path(__file__).with_name("no_device_driver.c")
_BUILT: Final = _ROOT / "build" / "cuda_model_for_python"
_FLAGS: Final = ("-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic")
_NAME: Final = "libcuda.so.1"
_NOT_READY: Final = 600
"""CUDA_ERROR_NOT_READY."""
_WORD_BYTES: Final = 8
# Copies, each with a pause now and then (model.h, pause_us).
_WORK: Final = 1000


def build(folder: Path) -> Path:
    """Puts the model into `folder`. The first of all processes compiles it, some ten seconds; the
    others wait for it, and later runs find it, until a source changes. Raises FileNotFoundError
    without a compiler or the native sources."""
    sources = sorted((_NATIVE / "tests" / "cuda_model").glob("*.cc"))
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or not sources:
        raise FileNotFoundError("no C++ compiler (c++ or g++), or no native sources")
    _BUILT.mkdir(parents=True, exist_ok=True)
    built, made_of = _BUILT / _NAME, _BUILT / "made_of"
    now = _fingerprint(compiler)
    with (_BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (built.exists() and made_of.exists() and made_of.read_text() == now):
            made_of.unlink(missing_ok=True)
            options = [*_FLAGS, f"-I{_NATIVE}", "-o", str(built)]
            subprocess.run([compiler, *options, *map(str, sources), "-lpthread"], check=True)
            made_of.write_text(now)
        # A copy: a library that a process has loaded must not change under it.
        shutil.copy(built, folder / _NAME)
    return folder


def _fingerprint(compiler: str) -> str:
    """All that the model may be made of: what it includes is not known before it is compiled."""
    files = [path for path in _NATIVE.rglob("*") if path.suffix in {".cc", ".h"}]
    files += (_ROOT / "kvwarehouse").rglob("*.cu")
    digest = hashlib.sha256(repr([compiler, *_FLAGS]).encode())
    for path in sorted(files):
        digest.update(f"{path}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def environment(folder: Path) -> dict[str, str]:
    """For processes whose clients are to use the model; NVRTC is modelled with it."""
    return {"KVW_CUDA_DRIVER": str(folder / _NAME), "KVW_NVRTC": str(folder / _NAME)}


class ModelArray:
    """uint8 (n, width) in the device's memory. Freed with the device. `interface`: what it says of
    itself, beside the stream that `ModelDevice.current` has made the current one."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.address, self.shape = address, shape
        self.interface: dict[str, Any] = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface | getattr(_thread, "says", {})


_thread = threading.local()  # its current stream, as frameworks have it


class ModelDevice:
    """Device 0, and an engine's stream on it."""

    streams = ("engine", "default", "thread's")
    of_another_process = (
        "from pathlib import Path\n"
        "from testkit.cuda_model import ModelDevice\n"
        "device = ModelDevice(Path(os.environ['KVW_CUDA_DRIVER']).parent)"
    )
    """What another process, which has the same environment, makes its device by."""

    def __init__(self, folder: Path) -> None:
        self._cuda = ctypes.CDLL(str(folder / _NAME))
        self._cuda.kvw_model_count.restype = ctypes.c_uint64
        self._check(self._cuda.cuInit(0))
        self._context = ctypes.c_void_p()
        self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0))
        self._check(self._cuda.cuCtxPushCurrent_v2(self._context))
        self._stream, self._event = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._cuda.cuStreamCreate(ctypes.byref(self._stream), 1))
        self._check(self._cuda.cuEventCreate(ctypes.byref(self._event), 2))
        # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD
        self._handles = {"engine": int(self._stream.value or 0), "default": 1, "thread's": 2}
        self._junk = self.allocate(2 * _WORD_BYTES)

    def enter(self) -> None:
        """Makes the device's context this thread's, as frameworks do before they call."""
        self._check(self._cuda.cuCtxSetCurrent(self._context))

    def wait_for_default_stream(self) -> None:
        """In the context that this thread has. Fails without one, and beside a captured graph."""
        self._check(self._cuda.cuStreamSynchronize(None))

    def set(self, name: str, value: int) -> None:
        self._cuda.kvw_model_set(name.encode(), ctypes.c_uint64(value))

    def count(self, name: str) -> int:
        return int(self._cuda.kvw_model_count(name.encode()))

    def array(self, data: NDArray[np.uint8]) -> ModelArray:
        """Device memory with these bytes, at once; address 0 where there are none, as frameworks
        say it."""
        address = ctypes.c_uint64()
        if not data.nbytes:
            return ModelArray(0, (data.shape[0], data.shape[1]))
        self._check(self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(data.nbytes)))
        made = ModelArray(address.value, (data.shape[0], data.shape[1]))
        self._cuda.kvw_model_poke(address, data.ctypes.data_as(ctypes.c_void_p), made_bytes(made))
        return made

    def free(self, array: ModelArray) -> None:
        """Nothing may be under way to or from it."""
        self.enter()
        self._check(self._cuda.cuMemFree_v2(ctypes.c_uint64(array.address)))

    def allocate(self, size_bytes: int) -> int:
        """The address of device memory that holds anything."""
        self.enter()
        address = ctypes.c_uint64()
        self._check(self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes)))
        return address.value

    def peek(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Device memory as it is now, in no stream's order."""
        data = np.empty(size_bytes, np.uint8)
        size = ctypes.c_size_t(size_bytes)
        self._cuda.kvw_model_peek(
            ctypes.c_uint64(address), data.ctypes.data_as(ctypes.c_void_p), size
        )
        return data

    def poke(self, address: int, data: NDArray[np.uint8]) -> None:
        """Overwrites device memory now, in no stream's order."""
        data = np.ascontiguousarray(data)
        size = ctypes.c_size_t(data.nbytes)
        self._cuda.kvw_model_poke(
            ctypes.c_uint64(address), data.ctypes.data_as(ctypes.c_void_p), size
        )

    def queue_copy(self, to: int, source: int, size_bytes: int) -> None:
        """Queues a copy within the device's memory on the engine's stream."""
        self.enter()
        self._check(
            self._cuda.cuMemcpyDtoDAsync_v2(
                ctypes.c_uint64(to),
                ctypes.c_uint64(source),
                ctypes.c_size_t(size_bytes),
                self._stream,
            )
        )

    @property
    def stream(self) -> int:
        """The engine's, as the driver takes it."""
        return self._handles["engine"]

    def pinned(self, size_bytes: int) -> int:
        """The address of pinned host memory, for as long as the process lives."""
        self.enter()
        address = ctypes.c_void_p()
        self._check(
            self._cuda.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size_bytes), 0)
        )
        return int(address.value or 0)

    def queue_upload(self, to: int, pinned: int, size_bytes: int) -> None:
        """Queues a copy from pinned memory to the device's on the engine's stream."""
        self.enter()
        self._check(
            self._cuda.cuMemcpyHtoDAsync_v2(
                ctypes.c_uint64(to),
                ctypes.c_void_p(pinned),
                ctypes.c_size_t(size_bytes),
                self._stream,
            )
        )

    def record(self) -> int:
        """The address of a new event behind what the engine's stream has queued."""
        self.enter()
        event = ctypes.c_void_p()
        self._check(self._cuda.cuEventCreate(ctypes.byref(event), 2))
        self._check(self._cuda.cuEventRecord(event, self._stream))
        return int(event.value or 0)

    def happened(self, event: int) -> bool:
        self.enter()
        result = int(self._cuda.cuEventQuery(ctypes.c_void_p(event)))
        assert result in (0, _NOT_READY), f"the model answers {result}"
        return result == 0

    def forget(self, event: int) -> None:
        self.enter()
        self._cuda.cuEventDestroy_v2(ctypes.c_void_p(event))

    def read(self, array: ModelArray) -> NDArray[np.uint8]:
        data = np.empty(array.shape, np.uint8)
        address = ctypes.c_uint64(array.address)
        self._cuda.kvw_model_peek(address, data.ctypes.data_as(ctypes.c_void_p), made_bytes(array))
        return data

    def address(self, array: ModelArray) -> int:
        return array.address

    @contextmanager
    def current(self, stream: str) -> Iterator[None]:
        """With it arrays say that they are computed on that one of `streams`, in this thread."""
        _thread.says = {"stream": self._handles[stream]}
        try:
            yield
        finally:
            _thread.says = {}

    @contextmanager
    def captured(self, stream: str) -> Iterator[None]:
        """With it another thread captures that one of `streams`; "default": a blocking stream,
        beside which nobody can use the default one."""
        self.set("captured", self._handles[stream])
        self.set("capture", 1)
        try:
            yield
        finally:
            self.set("capture", 0)
            self.set("captured", 0)

    def stream_of_another(self) -> int:
        """A stream of device 1, for as long as the process lives."""
        self.set("devices", 2)
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1))
        self._check(self._cuda.cuCtxPushCurrent_v2(context))
        self._check(self._cuda.cuStreamCreate(ctypes.byref(stream), 1))
        self._check(self._cuda.cuCtxPopCurrent_v2(None))
        return int(stream.value or 0)

    def queue_fill(self, array: ModelArray, data: NDArray[np.uint8], stream: str = "engine") -> int:
        """Queues the writing of `data` on a stream, behind work that takes the model longer than a
        store or a load that does not wait; the event that says it is done."""
        handle = ctypes.c_void_p(self._handles[stream])
        junk, size = ctypes.c_uint64(self._junk), ctypes.c_size_t(_WORD_BYTES)
        source = ctypes.c_uint64(self._junk + _WORD_BYTES)
        for _ in range(_WORK):
            self._check(self._cuda.cuMemcpyDtoDAsync_v2(junk, source, size, handle))
        size = made_bytes(array)
        host = ctypes.c_void_p()
        self._check(self._cuda.cuMemHostAlloc(ctypes.byref(host), size, 0))
        ctypes.memmove(host, data.ctypes.data, size.value)
        address = ctypes.c_uint64(array.address)
        self._check(self._cuda.cuMemcpyHtoDAsync_v2(address, host, size, handle))
        self._check(self._cuda.cuEventRecord(self._event, handle))
        return int(self._event.value or 0)

    @staticmethod
    def _check(result: int) -> None:
        assert result == 0, f"the model answers {result}"


def made_bytes(array: ModelArray) -> ctypes.c_size_t:
    return ctypes.c_size_t(array.shape[0] * array.shape[1])


def build_driver_without_devices(folder: Path) -> Path | None:
    """no_device_driver.c, which says what it is: the library, named as the driver's, in `folder`;
    None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, _NO_DEVICE], check=True)
    return library
