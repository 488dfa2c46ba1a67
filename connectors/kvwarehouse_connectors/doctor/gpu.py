"""Judges what a machine has for GPUs. Nothing here is a failure: each way has another beneath
it."""

from __future__ import annotations

import kvwarehouse as kvw
from kvwarehouse.host import Finding, Verdict, ok, skip, warn

_EXTRA = "pip install 'kvwarehouse[gds]' (docs/gpu.md: without what kvikio asks for)"


def findings_of(machine: kvw.gpu.Machine, choice: kvw.gpu.Choice | None) -> list[Finding]:
    """choice: None where nothing was to be measured."""
    driver, kvikio, way = machine.describe()
    return [
        Finding("driver", Verdict.OK if machine.has_device else Verdict.SKIP, driver),
        ok("kvikio", kvikio) if machine.kvikio else _without_kvikio(machine, kvikio),
        _storage(machine, way),
        _measured(choice),
    ]


def _without_kvikio(machine: kvw.gpu.Machine, words: str) -> Finding:
    if not machine.has_device:
        return skip("kvikio", words)
    return warn("kvikio", words, _EXTRA)


def _storage(machine: kvw.gpu.Machine, words: str) -> Finding:
    if machine.gds:
        return ok("GPUDirect Storage", words)
    if not machine.has_device:
        return skip("GPUDirect Storage", words)
    return warn(
        "GPUDirect Storage",
        words,
        "nothing has to be done: loads are right and slower; for the fast way, see gdscheck of"
        " NVIDIA's GPUDirect Storage and its list of file systems",
    )


def _measured(choice: kvw.gpu.Choice | None) -> Finding:
    if choice is None:
        return skip("NVMe to GPU", "not measured: name the daemon's segments with --segments")
    told = "; ".join(choice.describe()[len(choice.machine.describe()) :])
    return Finding("NVMe to GPU", Verdict.OK, told)
