"""This host, as it bears on a daemon: what it has, what it allows, and what is to be set otherwise.
Facts are read from /proc and /sys, each in one place here, for the daemon, for a bundle and for the
doctor. Findings are what the doctor says of a thing, of an engine too.

    asked = Tiers(dram_bytes=64 << 30)
    for finding in kvwarehouse.host.judge(address, path, error, status, asked, core_memory):
        print(finding.check, finding.verdict, finding.what, finding.fix)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvwarehouse.host import daemon_process
from kvwarehouse.host.checks import daemon_found, findings_of
from kvwarehouse.host.findings import Finding, Verdict, fail, healthy, ok, skip, warn
from kvwarehouse.host.limits import CoreMemory, Tiers, host_limits, tiers_of, with_asked
from kvwarehouse.host.memory import available_bytes
from kvwarehouse.host.remote import remote_facts, remote_findings

__all__ = [
    "CoreMemory",
    "Finding",
    "Tiers",
    "Verdict",
    "available_bytes",
    "fail",
    "healthy",
    "host_limits",
    "judge",
    "ok",
    "skip",
    "warn",
]


def judge(
    address: str,
    path: str,
    error: str,
    status: Mapping[str, Any],
    asked: Tiers,
    core_memory: CoreMemory,
) -> list[Finding]:
    """What limits a daemon here: the one at `address`, whose local socket is `path`, if its process
    can be looked at, else one that is started now. error: why it does not answer; else its status.
    asked: what it is to have in place of what it has. Waits for the file systems."""
    pid, problem = 0, error
    try:
        pid = daemon_process.pid_at(path)
    except OSError:
        problem = f"none at {address}"
    except LookupError as unseen:
        problem = str(unseen)
    limits = host_limits(with_asked(tiers_of(pid, status), asked))
    remote = remote_facts(asked.remote, asked.fleet_secret, status)
    checked = findings_of(limits, core_memory)
    return [daemon_found(path, pid, problem), *checked, *remote_findings(remote)]
