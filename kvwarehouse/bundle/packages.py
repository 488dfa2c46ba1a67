"""Versions of what a warehouse and its engines are made of, as far as this environment has them.
Imports none of it but the core. Stateless; thread-safe."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any, Final

_OURS: Final = (
    "kvwarehouse", "grpcio", "protobuf", "numpy", "rich", "lmdb", "msgpack", "pyzmq",
    "prometheus_client", "grpcio-health-checking", "grpcio-reflection",
    "obstore",
)  # fmt: skip
_ENGINES: Final = (
    "vllm", "sglang", "tensorrt-llm", "lmcache", "transformers", "torch", "cupy-cuda12x",
    "cupy-cuda13x", "kvikio-cu12", "kvikio-cu13", "triton", "flashinfer-python", "ai-dynamo",
)  # fmt: skip


def versions() -> dict[str, Any]:
    return {
        "packages": _found(_OURS),
        "engines": _found(_ENGINES),
        "core": _core(),
        "python": sys.version,
        "executable": sys.executable,
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "uid": os.geteuid(),
    }


def _found(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _core() -> dict[str, str]:
    """Of the native part, and what it chose for this machine."""
    try:
        from kvwarehouse import core
    except ImportError as error:
        return {"problem": str(error)}
    return {
        "version": core.VERSION,
        "copy_path": core.copy_path(),
        "io_engine": core.io_engine_probe(),
    }
