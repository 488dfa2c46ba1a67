"""Judges the machine: shared memory, limits."""

from __future__ import annotations

from collections.abc import Iterator

from kvwarehouse import format_size as size
from kvwarehouse.host import Finding, Verdict, ok, warn
from kvwarehouse_connectors.doctor.facts import Facts

# What containers get unless they ask for more.
_CONTAINER_SHM_BYTES = 64 << 20


def check_host(facts: Facts) -> Iterator[Finding]:
    yield _shared_memory(facts)
    yield _locked_memory(facts)


def _shared_memory(facts: Facts) -> Finding:
    """The arena reaches an engine as a descriptor, so the engine's own /dev/shm need not hold it;
    a daemon started here would put it there."""
    host = facts.host
    here = f"/dev/shm has {size(host.shm_bytes)}, {size(host.shm_free_bytes)} free"
    if facts.daemon.status:
        return ok("shared memory", f"{here}; the daemon's own memory is mapped")
    if host.shm_bytes <= _CONTAINER_SHM_BYTES:
        return warn(
            "shared memory",
            f"{here}: a daemon started here would have a DRAM tier of a few prompts",
            "start the container with --ipc=host or --shm-size (the DRAM tier, and what the engine"
            " itself needs), or run the daemon outside and mount its socket's directory",
        )
    return ok("shared memory", f"{here}: room for the DRAM tier of a daemon started here")


def _locked_memory(facts: Facts) -> Finding:
    limit = facts.host.memlock_bytes
    shown = "unlimited" if limit < 0 else size(limit)
    why = "host memory is not pinned"
    if facts.engine.device not in ("", "cpu"):
        why = "copies to and from the device go through memory that is not pinned"
    return Finding("locked memory", Verdict.OK, f"limit {shown}; not needed, {why}")
