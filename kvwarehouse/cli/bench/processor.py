"""What the core of a daemon takes of the processor: its own threads and the kernel's for it."""

from __future__ import annotations

from pathlib import Path

_THREADS = ("kvw-", "iou-wrk-")


def core_s(pid: int) -> float:
    """Seconds so far of the core's threads and of io_uring's workers, kernel and user together,
    from /proc/PID/task/*/schedstat (the kernel's sched-stats: nanoseconds on a processor first).
    Threads of Python and gRPC are left out, and so is what a thread took that has ended."""
    spent_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text(encoding="utf-8")
            if name.startswith(_THREADS):
                spent_ns += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return spent_ns / 1e9
