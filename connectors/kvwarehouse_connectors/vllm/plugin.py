"""What vLLM calls in each of its processes, through the entry point group `vllm.general_plugins`:
makes "WarehouseConnector" a name for --kv-transfer-config, has an engine that cannot be served
refused as soon as its configuration is made, and has media that clients named told from others.

vLLM shows a connector the whole configuration only when the model is loaded. So the method that
makes it is wrapped, in the process where an engine is asked for. Where it cannot be, the connector
refuses the same engines later, and shares no media.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from kvwarehouse_connectors.vllm import loaded_files

NAME = "WarehouseConnector"
_OF_THE_TIER = "WarehouseOffloadingConnector"


def register() -> None:
    """May be called more than once; imports nothing of the connector."""
    loaded_files.began()  # the first that vLLM does in the process of an engine
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvwarehouse_connectors.vllm.connector", NAME)
    # Loaded where an engine is asked for; elsewhere its configuration arrives made.
    asked = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    if hasattr(asked, "create_engine_config"):
        _check_configurations_of(asked)


def _check_configurations_of(engine_args: Any) -> None:
    create = engine_args.create_engine_config
    if getattr(create, "checked_by_kvwarehouse", False):
        return

    @functools.wraps(create)
    def create_checked(*args: Any, **kwargs: Any) -> Any:
        vllm_config = create(*args, **kwargs)
        loaded_files.began()
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector == NAME:
            from kvwarehouse_connectors.vllm.refusals import checked_settings

            checked_settings(vllm_config)
        if transfer is not None and transfer.kv_connector in (NAME, _OF_THE_TIER):
            from kvwarehouse_connectors.vllm import compat

            compat.mark_named_media(vllm_config)
        return vllm_config

    create_checked.checked_by_kvwarehouse = True  # type: ignore[attr-defined]
    engine_args.create_engine_config = create_checked
