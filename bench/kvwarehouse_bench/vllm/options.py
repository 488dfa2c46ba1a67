"""Options of engines, as vLLM's LLM and `vllm serve` take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvwarehouse_bench.vllm.checkpoint import BLOCK_TOKENS

ALONE = {"kvwarehouse.load": False, "kvwarehouse.store": False}
"""kv_transfer_params of a request that has nothing to do with the warehouse."""
PEER_ALONE = {"max_load_tokens": 0, "max_offload_tokens": 0}
"""The same for vLLM's own offloading."""


def engine_options(
    checkpoint: Path, longest_tokens: int, step_tokens: int, transfer: dict[str, Any]
) -> dict[str, Any]:
    """step_tokens: prefill of a step; a longer prompt takes several."""
    return {
        "model": str(checkpoint),
        "max_model_len": longest_tokens,
        "max_num_batched_tokens": step_tokens,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "disable_log_stats": False,
        "kv_transfer_config": transfer,
    }


def warehouse_transfer(address: str, role: str = "kv_both", **settings: Any) -> dict[str, Any]:
    """settings: the connector's, without their prefix."""
    return {
        "kv_connector": "WarehouseConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "kvwarehouse.address": address,
            **{f"kvwarehouse.{name}": value for name, value in settings.items()},
        },
    }


def toggled_transfer(address: str) -> dict[str, Any]:
    """The connector with a switch (toggled.py)."""
    return {
        **warehouse_transfer(address),
        "kv_connector": "Toggled",
        "kv_connector_module_path": "kvwarehouse_bench.vllm.toggled",
    }


def peer_transfer(engine_id: str, cpu_bytes: int, files: Path) -> dict[str, Any]:
    """vLLM's own offloading to memory and to files, with a worker for the CPU (peer.py)."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "kvwarehouse_bench.vllm.peer",
            "cpu_bytes_to_use": cpu_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(files)}],
        },
    }
