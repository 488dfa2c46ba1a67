"""The kernels of page_kernels.cu, compiled for a device by NVRTC, NVIDIA's compiler library.

NVRTC comes with torch, CuPy and the CUDA toolkit, so a process that has tensors on a GPU mostly
has it; alone it is the package nvidia-cuda-nvrtc (of CUDA 12: nvidia-cuda-nvrtc-cu12). Functions
and options as in NVIDIA's public NVRTC documentation. Thread-safe.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvwarehouse import core
from kvwarehouse.client.gpu import kernel_cache
from kvwarehouse.errors import InternalError, UsageError, WarehouseError

SOURCE = Path(__file__).with_name("page_kernels.cu")

_NAMES = {13: "libnvrtc.so.13", 12: "libnvrtc.so.12", 11: "libnvrtc.so.11.2"}
"""By the version of CUDA that they are of."""
_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
_TOOLKITS = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")


@cache
def compiled(major: int, minor: int) -> bytes:
    """The kernels as cuModuleLoadData takes them, for devices of compute capability major.minor.
    Blocks for a few seconds where nobody compiled them here before (kernel_cache.py).

    Raises UsageError (code "no_nvrtc") where NVRTC is not found or knows no device as old, and
    InternalError where it refuses the source, with its words. Of several NVRTCs each is tried."""
    refusals: list[WarehouseError] = []
    for library in compilers():
        try:
            return _image(library, SOURCE.read_bytes(), architecture(library, major, minor))
        except WarehouseError as refusal:
            refusals.append(refusal)
    if refusals:
        raise refusals[0]
    raise UsageError(
        "pages on a GPU need NVIDIA's compiler library NVRTC, and it is not found: install torch or"
        " CuPy with CUDA, or nvidia-cuda-nvrtc; or pass pages in host memory",
        code="no_nvrtc",
    )


def compilers() -> Iterator[ctypes.CDLL]:
    """Every NVRTC that this process can load, the likeliest first; each is loaded when asked for.
    KVW_NVRTC names another library instead (tests)."""
    named = os.environ.get("KVW_NVRTC")
    for candidate in [named] if named else _candidates(_driver_major()):
        try:
            _load_parts_of(candidate)
            yield ctypes.CDLL(candidate)
        except OSError:
            continue


def _load_parts_of(candidate: str) -> None:
    """The library loads its builtins by name at the first compilation, and where it comes without a
    RUNPATH (the packages of 13.0) they are not found beside it, unless they are in the process
    already."""
    if "/" not in candidate:
        return
    for builtins in sorted(Path(candidate).parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins))


def _driver_major() -> int:
    try:
        return core.cuda_version() // 1000
    except UsageError:
        return 0


def preferred(driver_major: int) -> list[str]:
    """NVRTC's names. What a compiler of the driver's own version of CUDA makes, the driver surely
    loads; drivers know what is older, and not always what is newer. 0: not known."""

    def order(major: int) -> tuple[bool, bool, int]:
        return major != driver_major, major > driver_major, -major

    return [_NAMES[major] for major in sorted(_NAMES, key=order)]


def _candidates(driver_major: int) -> Iterator[str]:
    """Each by the name that a process may have loaded it under already, then where packages put
    it."""
    folders = [Path(entry) / folder for entry in sys.path for folder in _FOLDERS]
    folders += [Path(toolkit) / "lib64" for toolkit in _TOOLKITS if toolkit]
    for name in preferred(driver_major):
        yield name
        yield from (str(folder / name) for folder in folders if (folder / name).exists())


def architecture(library: ctypes.CDLL, major: int, minor: int) -> str:
    """What to compile for: "sm_90", the device's own, which drivers of the compiler's major version
    of CUDA load, and later ones (an older major version's may refuse it). PTX is refused by drivers
    that are older than its compiler, so it is only for devices that are newer than the compiler:
    "compute_80", of the newest that it knows.

    Raises UsageError (code "no_nvrtc") for a device that is older than all it knows."""
    device, known = 10 * major + minor, _supported(library)
    if device in known:
        return f"sm_{device}"
    older = [each for each in known if each < device]
    if not older:
        raise UsageError(
            f"this NVRTC knows devices of compute capability {min(known) / 10:g} and later, and"
            f" this one has {major}.{minor}: install an older one (nvidia-cuda-nvrtc-cu12), or pass"
            " pages in host memory",
            code="no_nvrtc",
        )
    return f"compute_{max(older)}"


def _supported(library: ctypes.CDLL) -> list[int]:
    """Ten times the compute capabilities that the compiler knows."""
    count = ctypes.c_int()
    call = "nvrtcGetNumSupportedArchs"
    _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), call)
    known = (ctypes.c_int * count.value)()
    _check(library, library.nvrtcGetSupportedArchs(known), "nvrtcGetSupportedArchs")
    return list(known)


def _image(library: ctypes.CDLL, source: bytes, architecture: str) -> bytes:
    if "KVW_NVRTC" in os.environ:  # not what this machine's kernels are to be made by
        return compile_source(library, source, architecture)
    key = kernel_cache.key_of(source, architecture, _version(library))
    image = kernel_cache.recall(key)
    if image is None:
        image = compile_source(library, source, architecture)
        kernel_cache.remember(key, image)
    return image


def _version(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    result = library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    _check(library, result, "nvrtcVersion")
    return major.value, minor.value


def compile_source(library: ctypes.CDLL, source: bytes, architecture: str) -> bytes:
    """A cubin for a real architecture ("sm_80"), PTX for a virtual one ("compute_80"). Raises
    InternalError with the compiler's words."""
    program = ctypes.c_void_p()
    name = SOURCE.name.encode()
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        given = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        options = (ctypes.c_char_p * len(given))(*given)
        failed = library.nvrtcCompileProgram(program, len(given), options)
        if failed:
            log = _output(library, program, "nvrtcGetProgramLog")
            said = log.rstrip(b"\0").decode(errors="replace")
            raise InternalError(
                f"NVRTC does not compile {SOURCE.name} for {architecture}: {said}",
                code="bad_kernels",
            )
        real = architecture.startswith("sm_")
        return _output(library, program, "nvrtcGetCUBIN" if real else "nvrtcGetPTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _output(library: ctypes.CDLL, program: ctypes.c_void_p, call: str) -> bytes:
    """All of it: a cubin has zeros within, text a zero at its end."""
    size = ctypes.c_size_t()
    _check(library, getattr(library, call + "Size")(program, ctypes.byref(size)), call + "Size")
    output = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, call)(program, output), call)
    return output.raw


def _check(library: ctypes.CDLL, result: int, call: str) -> None:
    if result == 0:
        return
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    said = (library.nvrtcGetErrorString(result) or b"").decode()
    raise InternalError(f"{call}: {said or result}", code="bad_kernels")
