"""What this machine has for GPUs, told step by step: python -m kvwarehouse.gpu.probe. A process of
its own, because its last step may not end: opening a file for GPUDirect Storage has spun for ever
(direct_cufile.py)."""

from __future__ import annotations

import os
import tempfile
from importlib import import_module, metadata
from typing import Any

from kvwarehouse.gpu.direct_cufile import forbid_fallback, require_direct
from kvwarehouse.gpu.driver import Driver
from kvwarehouse.gpu.probe_process import report_steps

_PACKAGES = ("kvikio-cu13", "kvikio-cu12", "libkvikio-cu13", "libkvikio-cu12", "nvidia-cufile")
_TRIED_BYTES = 1 << 20


def _driver() -> dict[str, Any]:
    driver = Driver()
    found = {"cuda": driver.version(), "devices": driver.devices()}
    return found | {"shares": [driver.shares_memory(n) for n in range(len(found["devices"]))]}


def _packages() -> dict[str, Any]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"packages": versions}


def _kvikio() -> dict[str, Any]:
    return {"kvikio": str(import_module("kvikio").__version__)}


def _compat() -> dict[str, Any]:
    """Whether kvikio itself would take its POSIX path, asked with nothing forced."""
    defaults = import_module("kvikio.defaults")
    return {"compat_preferred": bool(defaults.is_compat_mode_preferred())}


def _gds() -> dict[str, Any]:
    """A read through cuFile into device memory, with all fallbacks switched off."""
    forbid_fallback()
    defaults = import_module("kvikio.defaults")
    kvikio = import_module("kvikio")
    driver = Driver()
    driver.use(0)
    memory = driver.memory(_TRIED_BYTES)
    defaults.set({"compat_mode": kvikio.CompatMode.OFF})
    with tempfile.NamedTemporaryFile(dir=os.environ.get("KVW_PROBE_DIR")) as file:
        file.write(os.urandom(_TRIED_BYTES))
        file.flush()
        os.fsync(file.fileno())
        with kvikio.CuFile(file.name, "r") as opened:
            got = opened.raw_read(memory, size=_TRIED_BYTES, file_offset=0)
    require_direct()
    return {"gds": got == _TRIED_BYTES}


def main() -> None:
    steps = {"driver": _driver, "packages": _packages, "kvikio": _kvikio}
    report_steps(steps | {"compat": _compat, "gds": _gds})


if __name__ == "__main__":
    main()
