"""TensorRT-LLM: a connector for its PyTorch backend (kv_connector_config). See docs/trtllm.md.

Importing it needs TensorRT-LLM; settings.py and what it builds on do not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvwarehouse_connectors.trtllm.connector import WarehouseScheduler, WarehouseWorker

__all__ = ["WarehouseScheduler", "WarehouseWorker"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvwarehouse_connectors.trtllm import connector

        return getattr(connector, name)
    raise AttributeError(f"{__name__} has no {name}")
