"""cuFile without its own fallback, for child processes that find out whether GPUDirect Storage
works here and how fast it is.

kvikio's CompatMode.OFF switches off kvikio's fallback alone. cuFile has another, which is on by
default (allow_compat_mode): what cannot go straight goes through host memory, and succeeds. An
engine's process is left as it is: other libraries there may count on the fallback.

Source: GPUDirect Storage API reference (cuFile Compatibility Mode, cuFileSetParameterBool) and
kvikio 26.10, python/kvikio/kvikio/cufile_driver.py. The variable is in cuFile 1.11 and 1.13, and
not any more in 1.20; the call came with 1.14.
"""

from __future__ import annotations

import ctypes
import os
from importlib import import_module
from pathlib import Path

LIBRARY = "libcufile.so.0"
_SETTINGS = {"CUFILE_ALLOW_COMPAT_MODE": "false", "CUFILE_FORCE_COMPAT_MODE": "false"}
_ALLOW_COMPAT_MODE = 1
"""CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE."""


_MODULES = Path("/proc/modules")


class _Result(ctypes.Structure):
    """CUfileError_t."""

    _fields_ = (("file", ctypes.c_int), ("driver", ctypes.c_int))


def forbid_fallback() -> None:
    """For the whole process, before it opens a file by cuFile. Imports kvikio, which loads it.

    Raises RuntimeError where opening would not end, rather than have it end by a deadline."""
    if not _MODULES.exists():
        raise RuntimeError(
            f"the kernel has no {_MODULES}, which cuFile reads in a loop without an end (seen with"
            " 1.19): there is no GPUDirect Storage in such a sandbox"
        )
    os.environ.update(_SETTINGS)
    import_module("kvikio")
    try:
        library = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        forbid = library.cuFileSetParameterBool
    except (OSError, AttributeError):
        return  # not loaded, or one that goes by the variable: require_direct says what came of it
    forbid.argtypes, forbid.restype = (ctypes.c_int, ctypes.c_bool), _Result
    forbid(_ALLOW_COMPAT_MODE, False)


def require_direct() -> None:
    """After a read. Raises RuntimeError where it may have gone through host memory."""
    driver = import_module("kvikio.cufile_driver")
    if driver.get("allow_compat_mode") and not driver.get("is_gds_available"):
        raise RuntimeError(
            "cuFile's own fallback cannot be switched off (properties.allow_compat_mode in"
            " cufile.json) and nvidia-fs is not loaded: what it reads goes through host memory"
        )
