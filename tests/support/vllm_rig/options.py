"""Options of engines, as vLLM's AsyncEngineArgs and `vllm serve` take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_rig.probe import PROBE

CONNECTOR = "WarehouseConnector"
TIER = "kvwarehouse_connectors.vllm_tier"


def engine_options(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    """Of an engine without a connector. float32: nothing is then lost in rounding, and outputs are
    compared to four digits."""
    return {
        "model": str(checkpoint),
        "max_model_len": 2048,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "num_gpu_blocks_override": 1024,
        "max_num_batched_tokens": 2048,
        "worker_extension_cls": PROBE,
        **changes,
    }


def transfer_config(address: str, **settings: Any) -> dict[str, Any]:
    """kv_transfer_config of an engine at that daemon. settings: the connector's, without their
    prefix; `kv_role` and `kv_load_failure_policy` as vLLM names them."""
    return {
        "kv_connector": CONNECTOR,
        "kv_role": settings.pop("kv_role", "kv_both"),
        "kv_load_failure_policy": settings.pop("kv_load_failure_policy", "recompute"),
        "kv_connector_extra_config": {
            "kvwarehouse.address": address,
            # A tiny model is computed faster than anything is loaded.
            "kvwarehouse.load": "always",
            # Not the default of 5 s: tests of bounds set their own, and all others have time.
            "kvwarehouse.load_timeout_s": 60,
            "kvwarehouse.store_timeout_s": 60,
            **{f"kvwarehouse.{name}": value for name, value in settings.items()},
        },
    }


def tiering_config(address: str, rows_bytes: int, **settings: Any) -> dict[str, Any]:
    """kv_transfer_config of an engine whose own offloading has the warehouse beneath it.
    rows_bytes: of vLLM's CPU tier. settings: the tier's, without their prefix."""
    tier = {"address": address, "load_timeout_s": 60, "store_timeout_s": 60, **settings}
    return {
        "kv_connector": "WarehouseOffloadingConnector",
        "kv_connector_module_path": TIER,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "vllm_rig.host_offloading",
            "cpu_bytes_to_use": rows_bytes,
            "secondary_tiers": [
                {
                    "type": "WarehouseTier",
                    "module_path": TIER,
                    **{f"kvwarehouse.{name}": value for name, value in tier.items()},
                }
            ],
        },
    }
