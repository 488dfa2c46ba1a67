"""Builds no_device_driver.c, which says what it is. Stateless."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("no_device_driver.c")


def build_driver(folder: Path) -> Path | None:
    """The library, named as the driver's, in `folder`; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, _SOURCE], check=True)
    return library
