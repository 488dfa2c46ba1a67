"""The peer's memory in /dev/shm: vLLM leaves it there when an engine is killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def offload_region() -> Iterator[str]:
    """An engine id of its own; its region is removed afterwards."""
    engine_id = f"kvw-bench-{os.urandom(6).hex()}"
    try:
        yield engine_id
    finally:
        for path in _SHARED_MEMORY.glob(f"vllm_offload_{engine_id}*"):
            path.unlink(missing_ok=True)
