"""KV of SGLang, kept in the warehouse: WarehouseStorage, for HiCache of SGLang 0.5.23 and later.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
          "backend_name": "kvwarehouse", "module_path": "kvwarehouse_connectors.sglang",
          "class_name": "WarehouseStorage", "interface_v1": 1,
          "kvwarehouse.address": "unix:///run/kvw/kvw.sock"}'

docs/sglang.md has the rest. Needs sglang, which is imported when the class is first used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WarehouseStorage"]


def __getattr__(name: str) -> Any:
    if name != "WarehouseStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvwarehouse_connectors.sglang.storage import WarehouseStorage

    return WarehouseStorage
