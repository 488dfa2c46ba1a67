"""The kernels of page_kernels.cu, compiled for a device by NVRTC, NVIDIA's compiler library.

NVRTC comes with torch, CuPy and the CUDA toolkit, so a process that has tensors on a GPU mostly
has it; alone it is the package nvidia-cuda-nvrtc-cu12. Functions and options as in NVIDIA's public
NVRTC documentation. Thread-safe.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

from kvwarehouse.errors import InternalError, UsageError

SOURCE = Path(__file__).with_name("page_kernels.cu")

# By the name that a process may have loaded it under already; then where packages put it.
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2")
_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
_TOOLKITS = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")


@cache
def compiled(major: int, minor: int) -> str:
    """PTX for devices of compute capability major.minor and later. Blocks for about a second.

    Raises UsageError (code "no_nvrtc") where NVRTC is not found, and InternalError where it refuses
    the source, with its words."""
    return compile_source(nvrtc(), SOURCE.read_bytes(), f"compute_{major}{minor}")


@cache
def nvrtc() -> ctypes.CDLL:
    """KVW_NVRTC names another library (tests). Raises UsageError (code "no_nvrtc")."""
    named = os.environ.get("KVW_NVRTC")
    for candidate in [named] if named else _candidates():
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise UsageError(
        "pages on a GPU need NVIDIA's compiler library NVRTC, and it is not found: install torch or"
        " CuPy with CUDA, or nvidia-cuda-nvrtc-cu12; or pass pages in host memory",
        code="no_nvrtc",
    )


def _candidates() -> list[str]:
    found = list(_NAMES)
    folders = [Path(entry) / folder for entry in sys.path for folder in _FOLDERS]
    folders += [Path(toolkit) / "lib64" for toolkit in _TOOLKITS if toolkit]
    for folder in folders:
        found += [str(folder / name) for name in _NAMES if (folder / name).exists()]
    return found


def compile_source(library: ctypes.CDLL, source: bytes, architecture: str) -> str:
    """`architecture`: "compute_80" and the like. Raises InternalError with the compiler's words."""
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
            said = _text(library, program, "nvrtcGetProgramLog")
            raise InternalError(
                f"NVRTC does not compile {SOURCE.name} for {architecture}: {said}",
                code="bad_kernels",
            )
        return _text(library, program, "nvrtcGetPTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, call: str) -> str:
    size = ctypes.c_size_t()
    _check(library, getattr(library, call + "Size")(program, ctypes.byref(size)), call + "Size")
    text = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, call)(program, text), call)
    return text.value.decode()


def _check(library: ctypes.CDLL, result: int, call: str) -> None:
    if result == 0:
        return
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    said = (library.nvrtcGetErrorString(result) or b"").decode()
    raise InternalError(f"{call}: {said or result}", code="bad_kernels")
