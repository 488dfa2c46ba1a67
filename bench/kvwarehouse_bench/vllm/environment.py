"""The environment of an engine's processes, the same for every engine of a run. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_BENCH = Path(__file__).resolve().parents[2]


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def engine_environment(
    folder: Path, cache_gib: int, cores: Sequence[int] | None = None
) -> dict[str, str]:
    """cores: that the engine computes on; None: all. Its threads are bound to them: left to itself
    vLLM keeps one for its front end in some runs and none in others, and figures differ twofold."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVW_", "VLLM_"))}
    bound = ",".join(map(str, cores or usable_cores()))
    path = os.pathsep.join([str(_BENCH), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **kept,
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",  # a source tree in the working directory hides no package
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "config"),
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": bound,
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
    }
