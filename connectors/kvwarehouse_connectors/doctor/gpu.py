"""Judges what a machine has for GPUs. Nothing here is a failure: each way has another beneath
it."""

from __future__ import annotations

import kvwarehouse as kvw

_EXTRA = "pip install 'kvwarehouse[gds]' (docs/gpu.md: without what kvikio asks for)"


def findings_of(machine: kvw.gpu.Machine, choice: kvw.gpu.Choice | None) -> list[kvw.host.Finding]:
    """choice: None where nothing was to be measured."""
    driver, kvikio, way = machine.describe()
    return [
        kvw.host.Finding(
            "driver", kvw.host.Verdict.OK if machine.has_device else kvw.host.Verdict.SKIP, driver
        ),
        kvw.host.ok("kvikio", kvikio) if machine.kvikio else _without_kvikio(machine, kvikio),
        _storage(machine, way),
        _measured(choice),
    ]


def _without_kvikio(machine: kvw.gpu.Machine, words: str) -> kvw.host.Finding:
    if not machine.has_device:
        return kvw.host.skip("kvikio", words)
    return kvw.host.warn("kvikio", words, _EXTRA)


def _storage(machine: kvw.gpu.Machine, words: str) -> kvw.host.Finding:
    if machine.gds:
        return kvw.host.ok("GPUDirect Storage", words)
    if not machine.has_device:
        return kvw.host.skip("GPUDirect Storage", words)
    return kvw.host.warn(
        "GPUDirect Storage",
        words,
        "nothing has to be done: loads are right and slower; for the fast way, see gdscheck of"
        " NVIDIA's GPUDirect Storage and its list of file systems",
    )


def _measured(choice: kvw.gpu.Choice | None) -> kvw.host.Finding:
    if choice is None:
        return kvw.host.skip(
            "NVMe to GPU", "not measured: name the daemon's segments with --segments"
        )
    told = "; ".join(choice.describe()[len(choice.machine.describe()) :])
    return kvw.host.Finding("NVMe to GPU", kvw.host.Verdict.OK, told)
