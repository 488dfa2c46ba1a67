"""KV of vLLM, kept in the warehouse: WarehouseConnector, for vLLM 0.32 and later.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "WarehouseConnector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvwarehouse.address": "unix:///run/kvw/kvw.sock"}}'

docs/vllm.md has the rest. Needs vllm, which is imported when the class is first used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WarehouseConnector"]


def __getattr__(name: str) -> Any:
    if name != "WarehouseConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvwarehouse_connectors.vllm.connector import WarehouseConnector

    return WarehouseConnector
