"""Under which conditions a bench ran: without them its figures say little."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from kvwarehouse import core
from kvwarehouse.sizes import format_size
from kvwarehouse_bench.micro.options import Options

_ROOT = Path(__file__).resolve().parents[3]
_GIT_S = 10.0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def conditions(options: Options) -> dict[str, str]:
    # A URL's query may have secrets.
    store = {"remote store": options.remote.partition("?")[0]} if options.remote else {}
    return {
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores usable",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "memory": f"{format_size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}, huge"
        f" pages: {_huge_pages('enabled')}, of shared memory unasked:"
        f" {_huge_pages('shmem_enabled')}",
        "load before": load_average(),
        "core": f"{core.VERSION}, {commit()}, copies with {core.copy_path()}",
        "moved": f"{format_size(options.moved_bytes)} a round, in pages of"
        f" {format_size(options.page_bytes)} where a measure names no other",
        "rounds": f"{options.rounds}, alternating with the limit's",
        **store,
    }


def commit() -> str:
    """Of the sources that run, where they are a checkout: figures of one tree say little about
    another. Asks git, a few milliseconds."""
    if not (_ROOT / ".git").exists():
        return "no checkout"
    try:
        named = subprocess.run(
            ["git", "-C", _ROOT, "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return "commit unknown"
    return f"commit {named.stdout.strip()}"


def load_average() -> str:
    """Over 1, 5 and 15 minutes: above the cores there are, the figures say little."""
    return " ".join(f"{load:.2f}" for load in os.getloadavg())


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _huge_pages(switch: str) -> str:
    """What the kernel gives: of memory, and so to fio's buffers; to /dev/shm by itself."""
    try:
        text = (_HUGE_PAGES / switch).read_text(encoding="utf-8")
    except OSError:
        return "not there"
    return text.partition("[")[2].partition("]")[0] or "not there"
