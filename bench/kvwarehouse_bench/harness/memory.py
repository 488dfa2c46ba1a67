"""What this machine's memory can do at most. Stateless."""

from __future__ import annotations

import statistics
from typing import Any

from kvwarehouse_bench.micro.load import copied
from kvwarehouse_bench.micro.options import noise

_COPIED_PAGES, _COPIED_PAGE_BYTES = 64, 2 << 20
_COPIES = 5


def copy_bytes_per_s() -> float:
    """A plain streaming copy of memory by one thread: what a load can reach at most."""
    pages = noise(_COPIED_PAGES, _COPIED_PAGE_BYTES)
    to: Any = pages.copy()
    copied(to, pages)
    return pages.nbytes / statistics.median(copied(to, pages) for _ in range(_COPIES))
