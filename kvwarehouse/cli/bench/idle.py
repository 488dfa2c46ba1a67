"""What a daemon costs while nobody asks anything of it: its processor time over some seconds."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvwarehouse.cli.bench.figures import Figure
from kvwarehouse.cli.bench.options import Bench
from kvwarehouse.errors import UsageError

_SECONDS = 10.0


def measure(bench: Bench) -> list[Figure]:
    if bench.daemon is None:
        raise UsageError("idle measures a private daemon only", code="bad_bench")
    pid = bench.daemon.pid
    before, start = _processor_s(pid), time.monotonic()
    time.sleep(_SECONDS)
    used, passed = _processor_s(pid) - before, time.monotonic() - start
    return [
        Figure(
            name="idle daemon",
            value=100 * used / passed,
            unit="% of a core",
            goal="under 1 %",
        )
    ]


def _processor_s(pid: int) -> float:
    """User and system time of all threads, from /proc/PID/stat (proc(5): fields 14 and 15)."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
