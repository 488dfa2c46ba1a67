"""KV of engines behind LMCache, kept in the warehouse: WarehouseL2Adapter, an L2 of LMCache's
server (its multiprocess mode), 0.5.6 and later.

    lmcache server --l1-size-gb 20 --eviction-policy LRU --l2-adapter '{
      "type": "plugin", "module_path": "kvwarehouse_connectors.lmcache",
      "class_name": "WarehouseL2Adapter", "adapter_params": {
        "kvwarehouse.address": "unix:///run/kvw/kvw.sock",
        "kvwarehouse.checkpoints": {"MODEL": "/models/MODEL"}}}'

docs/lmcache.md has the rest. Needs lmcache, which is imported when the class is first used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WarehouseL2Adapter"]


def __getattr__(name: str) -> Any:
    if name != "WarehouseL2Adapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvwarehouse_connectors.lmcache.adapter import WarehouseL2Adapter

    return WarehouseL2Adapter
