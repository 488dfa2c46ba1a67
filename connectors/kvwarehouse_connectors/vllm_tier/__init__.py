"""KV that vLLM's own OffloadingConnector takes out of its GPUs, kept in the warehouse:
WarehouseTier, a secondary tier of TieringOffloadingSpec, for vLLM 0.32 and later.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "WarehouseOffloadingConnector",
        "kv_connector_module_path": "kvwarehouse_connectors.vllm_tier", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184,
            "secondary_tiers": [{"type": "WarehouseTier",
                "module_path": "kvwarehouse_connectors.vllm_tier",
                "kvwarehouse.address": "unix:///run/kvw/kvw.sock"}]}}'

docs/vllm.md has the rest. Needs vllm, which is imported when a class is first used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WarehouseOffloadingConnector", "WarehouseTier"]


def __getattr__(name: str) -> Any:
    if name == "WarehouseOffloadingConnector":
        from kvwarehouse_connectors.vllm_tier.connector import WarehouseOffloadingConnector

        return WarehouseOffloadingConnector
    if name == "WarehouseTier":
        from kvwarehouse_connectors.vllm_tier.tier import WarehouseTier

        return WarehouseTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
