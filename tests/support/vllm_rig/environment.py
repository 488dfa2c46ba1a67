"""The environment of an engine's processes. Reads this machine, changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

_CACHE_GIB = 1


def engine_environment(folder: Path, ranks: int = 1) -> dict[str, str]:
    """ranks: of all stages. Without cores named for each, vLLM wants a NUMA node a rank, and
    may keep one of two cores for itself."""
    cores = sorted(os.sched_getaffinity(0))[: max(2, ranks)]
    share = max(1, len(cores) // ranks)
    bound = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVW_", "VLLM_"))}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "config"),
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, each)) for each in bound),
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
    }
