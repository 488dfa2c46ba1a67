"""What vLLM calls in each of its processes, through the entry point group `vllm.general_plugins`:
makes "WarehouseConnector" a name for --kv-transfer-config."""

from __future__ import annotations

NAME = "WarehouseConnector"


def register() -> None:
    """May be called more than once; imports nothing of the connector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvwarehouse_connectors.vllm.connector", NAME)
