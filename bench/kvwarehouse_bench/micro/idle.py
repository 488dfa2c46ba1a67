"""What a daemon costs while nobody asks anything of it: processor time over some seconds, and
memory beside the arena and the index, whose sizes are given."""

from __future__ import annotations

import time

from kvwarehouse.errors import UsageError
from kvwarehouse_bench.micro.figures import Figure
from kvwarehouse_bench.micro.options import Bench
from kvwarehouse_bench.micro.process import processor_s, resident_bytes

_MEGABYTE = 1e6


def measure(bench: Bench) -> list[Figure]:
    if bench.daemon is None:
        raise UsageError("idle measures a private daemon only", code="bad_bench")
    pid, arena_dir = bench.daemon.pid, bench.daemon.arena_dir
    before, start = processor_s(pid), time.monotonic()
    time.sleep(bench.options.sizes.idle_s)
    used, passed = processor_s(pid) - before, time.monotonic() - start
    beside = resident_bytes(pid, (str(arena_dir / "arena"), str(arena_dir / "index.")))
    return [
        Figure("idle daemon", 100 * used / passed, "% of a core", goal="under 0.5 % of a core"),
        Figure(
            "idle daemon, resident beside arena and index",
            beside / _MEGABYTE,
            "MB",
            goal="under 200 MB",
        ),
    ]
