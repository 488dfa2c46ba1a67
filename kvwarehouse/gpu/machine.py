"""What this machine has for GPUs, and what that means, in words. Looking runs in a bounded process
of its own (probe.py) and never raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvwarehouse.gpu.probe_process import run_probe

PROBE = "kvwarehouse.gpu.probe"
PROBE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Machine:
    cuda: str = ""
    """Version that the driver speaks; empty: there is no driver."""
    driver_error: str = ""
    devices: Sequence[str] = ()
    shares: Sequence[bool] = ()
    """Of each device: whether a daemon can keep pages in its memory and hand it to engines."""
    kvikio: str = ""
    kvikio_error: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    compat_preferred: bool = True
    compat_error: str = ""
    gds: bool = False
    """Whether a read through cuFile, with its own fallback and kvikio's switched off, brought the
    bytes."""
    gds_error: str = ""
    problem: str = ""
    """Why the probe did not end by itself, and in which step."""

    @property
    def has_device(self) -> bool:
        return bool(self.cuda and self.devices)

    def describe(self) -> list[str]:
        """What is there, what is used instead of what is not, and why. A line each."""
        return [self._driver_words(), self._kvikio_words(), self._path_words()]

    def _driver_words(self) -> str:
        if not self.cuda:
            return f"no CUDA driver ({self.driver_error or self.problem or 'not found'}): no GPU"
        if not self.devices:
            return f"CUDA driver {self.cuda}, and no device"
        there = f"CUDA driver {self.cuda}, {len(self.devices)} device(s): {', '.join(self.devices)}"
        return there + self._hbm_words()

    def _hbm_words(self) -> str:
        if not self.shares:
            return ""
        able = [str(number) for number, shares in enumerate(self.shares) if shares]
        if not able:
            return "; no HBM tier: no device shares memory by file descriptors (cuMem)"
        return f"; an HBM tier can be had (serve --hbm SIZE --device {'|'.join(able)})"

    def _kvikio_words(self) -> str:
        if not self.kvikio:
            why = self.kvikio_error or self.problem or "not found"
            return f"no kvikio ({' '.join(why.split())}): install kvwarehouse[gds]"
        brought = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        return f"kvikio {self.kvikio} ({brought or 'from no package'})"

    def _path_words(self) -> str:
        dram = "pages on NVMe reach a GPU through pinned host memory, promoted by the daemon"
        if not self.has_device:
            return "pages on NVMe go to host memory: there is no GPU to bring them to"
        if not self.kvikio:
            return f"{dram}: kvikio is missing"
        if self.gds:
            return "GPUDirect Storage works: NVMe is read into device memory, without a fallback"
        why = self.gds_error or self.problem or "cuFile brought too few bytes"
        return f"no GPUDirect Storage ({why}): kvikio reads through its own host buffers, or {dram}"


def probe_machine(
    timeout_s: float = PROBE_TIMEOUT_S, folder: str = "", module: str = PROBE
) -> Machine:
    """Blocks for at most timeout_s. folder: on the file system to try GPUDirect Storage with."""
    told = run_probe(module, [], timeout_s, {"KVW_PROBE_DIR": folder} if folder else None)
    known = {each.name for each in fields(Machine)}
    values: dict[str, Any] = {}
    for answer in told.answers:
        values |= {name: value for name, value in answer.items() if name in known}
    step = told.steps[-1] if told.steps else "start"
    problem = f"in the step {step!r} the probe {told.problem}" if told.problem else ""
    return Machine(**values | {"problem": problem})
