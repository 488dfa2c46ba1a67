"""What a process holds and uses, as the kernel counts it (proc(5)). Stateless; thread-safe."""

from __future__ import annotations

import os
import re
from pathlib import Path

_CORE_THREADS = ("kvw-", "iou-wrk-")
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(?P<path>.*)")


def processor_s(pid: int) -> float:
    """User and system time of all threads, from /proc/PID/stat: fields 14 and 15."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def core_s(pid: int) -> float:
    """Seconds so far of a daemon's core threads and of io_uring's workers, kernel and user
    together, from /proc/PID/task/*/schedstat (the kernel's sched-stats: nanoseconds on a processor
    first). Threads of Python and gRPC are left out, and so is what a thread took that has ended."""
    spent_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text(encoding="utf-8")
            if name.startswith(_CORE_THREADS):
                spent_ns += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return spent_ns / 1e9


def private_bytes(pid: int) -> int:
    """Resident memory of its own, which no file backs."""
    # RssAnon of its status is off by some pages for each processor on kernels of the years from
    # Linux 6.2 on: they do not add up what each one has counted for itself.
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    facts = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return int(facts["Anonymous"].split()[0]) * 1024


def resident_bytes(pid: int, but: tuple[str, ...] = ()) -> int:
    """All resident memory, code and shared memory too, but for mappings of files under the paths
    that begin so."""
    counted, resident = True, 0
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if found := _MAPPING.fullmatch(line):
            counted = not found["path"].startswith(but) if but else True
        elif counted and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


def huge_bytes(pid: int, under: str) -> int:
    """Mapped by huge pages, of files under the path that begins so."""
    counted, huge = False, 0
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if found := _MAPPING.fullmatch(line):
            counted = found["path"].startswith(under)
        elif counted and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
            huge += int(line.split()[1]) * 1024
    return huge


def taken_bytes(folder: Path, pattern: str) -> int:
    """Of a filesystem, by files of this folder: what is allocated, not what they could hold."""
    return sum(file.stat().st_blocks * 512 for file in folder.glob(pattern))
